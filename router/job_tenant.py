"""Whose jobs and files a call is about."""

from __future__ import annotations


def calling_tenant() -> str:
    """Of the running task's call; empty where no keys are asked for."""
    return ""
