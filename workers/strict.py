"""What every group of settings is: frozen, without keys that it does not know."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    # What stands below a field is its description, in the JSON schema and in docs/configuration.md.
    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=(), use_attribute_docstrings=True
    )
