"""The documentation's page of settings, written from what each setting says of itself.

Run `python -m fedld.config.page > docs/settings.md` after a change; a test compares the two.
"""

import json

from fedld.config.experiment import SETTINGS
from fedld.config.settings import SECTIONS, Setting

HEAD = """# Settings

Every setting is a key of the TOML file that `--config` reads, an option of the command line, and a keyword of
`fedld.run` and `fedld.compare`. A run saves all of them, resolved, in its `config.toml`. *Site* marks what a
server may set at a site; runs that differ in what is marked *same* do not stand in one table.

<!-- Made by `python -m fedld.config.page > docs/settings.md`. -->
"""


def settings_page() -> str:
    """Write one table per section, one row per setting."""
    return "\n".join([HEAD, *(_section(name) for name in SECTIONS)])


def _section(section: str) -> str:
    rows = [_row(setting) for setting in SETTINGS.values() if setting.section == section]
    head = ["| setting | option | default | meaning | |", "|---|---|---|---|---|"]
    return "\n".join([f"## {section.capitalize()}", "", *head, *rows, ""])


def _row(setting: Setting) -> str:
    default = setting.default["name"] if setting.name == "method" else setting.default
    text = "" if default in (None, {}) else f"`{json.dumps(default).strip(chr(34))}`"
    marks = ", ".join(
        word for word, marked in (("site", setting.sent_to_sites), ("same", setting.compared)) if marked
    )
    return f"| `{setting.name}` | `{setting.option}` | {text} | {setting.help} | {marks} |"


if __name__ == "__main__":
    print(settings_page(), end="")
