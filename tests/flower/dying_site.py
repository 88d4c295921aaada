"""`python dying_site.py NUMBER WORDS...` is `fedld WORDS...`, with a site that is killed at a message.

NUMBER 1 is the order of a round, 2 to 5 are the further messages of its secure sum. All processes of the site
end at once, before anything of that message is answered, as in a power cut.
"""

import os
import signal
import sys

from fedld.__main__ import main
from fedld.engine.backends.flower import site

NUMBER = int(sys.argv.pop(1)) if __name__ == "__main__" else 0


def dying(real):
    """An `unpack` that ends the site where the message has come."""

    def unpack(kind, content):
        part = real(kind, content)
        order = isinstance(part, site.Order) and part.jobs
        if (1 if order else getattr(part, "number", 0)) == NUMBER:
            os.killpg(0, signal.SIGKILL)
        return part

    return unpack


if __name__ == "__main__":
    site.unpack = dying(site.unpack)
    main()
