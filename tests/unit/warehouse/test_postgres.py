from __future__ import annotations

import pytest
from psycopg2.extensions import make_dsn

from batchsql.warehouse.postgres import without_password

PASSWORDS = ["plain", "two words", "it's", "back\\slash", "a\\'b c", "'", "x=1 password=y", '"q"']


@pytest.mark.parametrize("password", PASSWORDS)
def test_password_of_a_connection_string_is_left_out(password: str) -> None:
    conninfo = make_dsn(host="db", password=password, user="me")
    assert without_password(f"cannot use: {conninfo}") == "cannot use: host=db password=... user=me"
