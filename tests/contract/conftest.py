"""Lets pytest explain the asserts of the shared suites, which are no test modules themselves."""

import pytest

pytest.register_assert_rewrite("tests.contract.base_dialect")
