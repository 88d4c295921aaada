"""`python dying_site.py PLACE WORDS...` is `fedld WORDS...`, with a site that is killed at a message.

PLACE 1 is the order of a round, 2 to 5 are the further messages of the secure sum of updates, "candidates 2"
to "candidates 5" those of the sum of losses at candidate steps, gram2 and gram3 those of the Gram matrix.
All processes of the site end at once, before anything of that message is answered, as in a power cut.
"""

import os
import signal
import sys

from fedld.__main__ import main
from fedld.engine.backends.flower import secure_site, site

PLACE = sys.argv.pop(1) if __name__ == "__main__" else ""


def end():
    os.killpg(0, signal.SIGKILL)


def dying_unpack(real):
    """An `unpack` that ends the site where an order has come."""

    def unpack(kind, content):
        part = real(kind, content)
        if PLACE == "1" and isinstance(part, site.Order) and part.jobs:
            end()
        return part

    return unpack


def dying_answer(real, prefix):
    """A side of a secure computation that ends the site at a message."""

    def answer(state, number, content, side):
        candidates = "candidates " if state.context.purpose == "candidates" else ""
        if f"{candidates}{prefix}{number}" == PLACE:
            end()
        return real(state, number, content, side)

    return answer


if __name__ == "__main__":
    site.unpack = dying_unpack(site.unpack)
    secure_site.answer_sum = dying_answer(secure_site.answer_sum, "")
    secure_site.answer_gram = dying_answer(secure_site.answer_gram, "gram")
    main()
