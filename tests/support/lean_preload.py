"""What the fork server imports once, so that each process of a test starts at once."""

import contextlib
import importlib

import adbc_driver_postgresql.dbapi
import duckdb
import psycopg2

import tests.support.lean

for _sdk in (
    "openai",
    "anthropic",
    "google.genai",
    "boto3",
    "botocore.httpsession",
    "genai_prices",
):
    with contextlib.suppress(ImportError):
        importlib.import_module(_sdk)

__all__ = ["adbc_driver_postgresql", "duckdb", "psycopg2", "tests"]
