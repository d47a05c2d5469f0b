"""The version of batchsql, read by the build and compared with the macros' own."""

__version__ = "0.1.0"
