"""What the fork server imports once, so that each process of a test starts at once."""

import adbc_driver_postgresql.dbapi
import duckdb
import psycopg2

import tests.support.lean

__all__ = ["adbc_driver_postgresql", "duckdb", "psycopg2", "tests"]
