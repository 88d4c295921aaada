"""What is said of a setting, once: its section, its help text, who must know it and who must agree on it."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

from pydantic import BaseModel, Field

SettingSection = Literal["data", "model", "training", "evaluation", "run"]
SECTIONS: tuple[SettingSection, ...] = get_args(SettingSection)


@dataclass(frozen=True)
class Setting:
    """One setting of an experiment.

    travels: a server may set it at a site, so it names no file and no device.
    compared: runs must agree on it to stand in one table.
    """

    name: str
    section: SettingSection
    help: str
    default: Any
    annotation: Any
    travels: bool
    compared: bool

    @property
    def option(self) -> str:
        """Its name on the command line."""
        return "--" + self.name.replace("_", "-").replace("metrics", "metric")


def setting(
    section: SettingSection,
    default: Any,
    text: str,
    *,
    travels: bool = False,
    compared: bool = False,
) -> Any:
    """A field of the experiment with all that is said of it; `text` is its help, a short phrase."""
    extra: dict[str, Any] = {"section": section, "travels": travels, "compared": compared}
    return Field(default, description=text, json_schema_extra=extra)


def settings_of(model: type[BaseModel]) -> dict[str, Setting]:
    """Every setting of a model whose fields were made by `setting`, in order."""
    settings = {}
    for name, field in model.model_fields.items():
        extra: Any = field.json_schema_extra
        settings[name] = Setting(
            name, help=field.description or "", default=field.default, annotation=field.annotation, **extra
        )
    return settings
