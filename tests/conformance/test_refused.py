"""What is known not to be measured is refused in one line; docs/models.md says of all architectures what is true."""

from __future__ import annotations

import pytest
from architectures import REFUSED, build
from table import FILE, table
from test_architectures import DOCUMENTS

import pavinterp as pi
from pavinterp.errors import UserError


@pytest.mark.parametrize("name", REFUSED)
def test_refused_in_one_line(name):
    with pytest.raises(UserError, match=REFUSED[name].message) as error:
        pi.measure(pi.load(build(name)), DOCUMENTS, context=20, tests=4, examples=False)
    assert "\n" not in str(error.value)


def test_the_table_of_architectures_is_that_of_the_suite():
    assert FILE.read_text(encoding="utf-8") == table()
