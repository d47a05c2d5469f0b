"""Found by dbt at every start, by its name: makes batchsql's adapter methods known to dbt.

An import error here would break every dbt project in the environment, so it is kept for the moment
in which an llm model asks for what is missing.
"""

try:
    from batchsql.dbt import BatchsqlPlugin

    plugins = [BatchsqlPlugin]
except ImportError:  # for example a dbt-core whose plugin interface has changed
    plugins = []
