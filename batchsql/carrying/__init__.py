"""Carry a ledger to another warehouse, or into a backup: as Parquet files in a folder.

``docs/ledger.md`` tells readers what an export holds.
"""
