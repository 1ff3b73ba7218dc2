"""Reading YAML that somebody else may have written: plain values of a bounded size, or one error."""

from __future__ import annotations

from typing import Any

import yaml

LIMIT = 2**16  # bytes; a configuration has a few thousand
DEPTH = 50  # of values inside each other; a configuration has three


class BadYAML(ValueError):
    """The text cannot be read; the message says why, for the end of a sentence."""


def read_yaml_text(data: bytes) -> Any:
    """The values in a YAML text. Aliases are refused: a few lines of them can stand for more than fits in memory."""
    if len(data) > LIMIT:
        raise BadYAML(f"is too long for a configuration ({len(data)} bytes)")
    try:
        return yaml.load(data, Loader=_Loader)
    except BadYAML:
        raise
    except yaml.YAMLError as error:
        where = getattr(error, "problem_mark", None)
        raise BadYAML(f"is not valid YAML{f' (line {where.line + 1})' if where else ''}") from None
    # What looks like a date, a number or base64 and is none makes the constructors of these types fail.
    except (ValueError, TypeError, LookupError, ArithmeticError, AttributeError):
        raise BadYAML("has a value that YAML takes for a number, a date or the like, and that is none") from None


class _Loader(yaml.SafeLoader):
    _depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self._depth > DEPTH:
            raise BadYAML("is nested too deeply")
        if self.check_event(yaml.events.AliasEvent):
            line = self.peek_event().start_mark.line + 1
            raise BadYAML(f"uses an alias (line {line}); write the value out")
        self._depth += 1
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        seen = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise BadYAML(f"has '{key.value}' twice (the second in line {key.start_mark.line + 1}); keep one")
            seen.add(key.value if isinstance(key, yaml.ScalarNode) else id(key))
        return super().construct_mapping(node, deep)
