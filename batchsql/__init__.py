"""LLM enrichment columns for dbt models: incremental, resumable, typed, never paid for twice."""

from batchsql.version import __version__

__all__ = ["__version__"]
