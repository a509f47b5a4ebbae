"""The models of outlier arrays, one by one."""

from __future__ import annotations

import pytest

from tests.members import MODELS


@pytest.fixture(params=MODELS, ids=lambda model: model.__name__)
def model(request):
    return request.param
