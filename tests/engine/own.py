"""Small federations with a method of ``own_methods.py``, on both executors."""

from __future__ import annotations

from typing import Any

import pytest

from isofed.engine.workers import Pool
from isofed.federation import Federation
from tests.engine.own_methods import HERE
from tests.engine.plain import small

BOTH = pytest.mark.parametrize("executor", ["serial", "workers"])


def own(name: str, pool: Pool | None = None, executor: str = "serial", **settings: Any) -> Federation:
    return small(method=f"{HERE}:{name}", executor=executor, pool=pool, **settings)
