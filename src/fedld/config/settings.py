"""Metadata of a setting: its section, help text, whether sites get it and whether runs must agree on it."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

from pydantic import BaseModel, Field

SettingSection = Literal["data", "model", "training", "evaluation", "run"]
SECTIONS: tuple[SettingSection, ...] = get_args(SettingSection)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting of an experiment.

    sent_to_sites: a server may set it at a site, so it names no file and no device.
    compared: runs must agree on it to stand in one table.
    """

    name: str
    section: SettingSection
    help: str
    default: Any
    annotation: Any
    sent_to_sites: bool
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
    sent_to_sites: bool = False,
    compared: bool = False,
) -> Any:
    """Make a field of the experiment with its metadata; `text` is its help, a short phrase."""
    extra: dict[str, Any] = {"section": section, "sent_to_sites": sent_to_sites, "compared": compared}
    return Field(default, description=text, json_schema_extra=extra)


def settings_of(model: type[BaseModel]) -> dict[str, Setting]:
    """List the settings of a model in order; its fields were made by `setting`."""
    settings = {}
    for name, field in model.model_fields.items():
        extra: Any = field.json_schema_extra
        settings[name] = Setting(
            name=name,
            help=field.description or "",
            default=field.default,
            annotation=field.annotation,
            **extra,
        )
    return settings
