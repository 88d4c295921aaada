"""`python hostile_site.py LIES WORDS...` is `fedld WORDS...`, with a site that lies about what it measured.

LIES is a JSON list: in its n-th training the site changes its answer's fields by the n-th entry of the list,
`{"before.loss": -1.0}` for example.
"""

import json
import sys
from pathlib import Path

from fedld.__main__ import main
from fedld.engine.backends.flower import site
from fedld.engine.backends.flower.wire import Answer

LIES = json.loads(sys.argv.pop(1)) if __name__ == "__main__" else []
HONEST = site.pack


def lying(part, **trees):
    """The site's own `pack`; every task is a process of its own, so a file counts the trainings."""
    if isinstance(part, Answer) and part.results:
        count = Path("trainings")
        for one in part.results:
            if "metrics" not in one:
                continue
            number = len(count.read_text()) if count.exists() else 0
            count.write_text("x" * (number + 1))
            for path, value in (LIES[number] if number < len(LIES) else {}).items():
                *folders, last = path.split(".")
                target = one
                for folder in folders:
                    target = target[folder]
                target[last] = value
        if part.results[0].get("count") is not None:  # a loss by itself: the validation images
            part.results[0].update(count=2**52, loss=-(2.0**50))
    return HONEST(part, **trees)


if __name__ == "__main__":
    site.pack = lying
    main()
