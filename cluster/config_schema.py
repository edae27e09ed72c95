"""The JSON schema of a config file, for editors: each key with its meaning, its default and what it may be."""

from __future__ import annotations

from typing import Any

from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import CoreSchema

from cluster.config import ClusterConfig, RoleConfig


class _WithoutTitles(GenerateJsonSchema):
    """A key is its own title."""

    def field_title_should_be_set(self, schema: CoreSchema | Any) -> bool:
        return False


def config_schema() -> dict[str, Any]:
    schema = ClusterConfig.model_json_schema(schema_generator=_WithoutTitles)
    for key, of_role in schema["$defs"][RoleConfig.__name__]["properties"].items():
        if "description" not in of_role:
            # It means what the whole cluster's key of that name does.
            of_role["description"] = ClusterConfig.model_fields[key].description
    return {"$schema": GenerateJsonSchema.schema_dialect, **schema, "title": "A config file of kvferry"}
