"""The laws, one file a family. A new one is a value (or a class) in such a file, named in the line below."""

from lm.base.config import nearest
from lm.base.errors import UsageError
from lm.scaling.laws import broken, joint, power, repeated, setting
from lm.scaling.laws.base import Law

LAWS: tuple[Law, ...] = tuple(law for family in (power, joint, repeated, broken, setting) for law in family.LAWS)


def law_named(name: str, where: str = "--law") -> Law:
    """The law of that name; a refusal says that it was asked for `where`.

    Raises:
      UsageError: no such law; the nearest is named.
    """
    for law in LAWS:
        if law.name == name:
            return law
    raise UsageError(f"there is no law '{name}'", where=where, do=nearest(name, [law.name for law in LAWS]))


def listing() -> str:
    """Every law in plain text: name, formula, source."""
    widths = (max(len(law.name) for law in LAWS), max(len(law.formula) for law in LAWS))
    return "\n".join(f"{law.name:<{widths[0]}}  {law.formula:<{widths[1]}}  {law.source}" for law in LAWS)
