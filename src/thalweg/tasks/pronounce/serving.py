"""A model of pronunciation in the box as a service asks it."""

from __future__ import annotations

import json
from typing import Any

from thalweg.tasks.boxed.models import boxed, folder_of
from thalweg.tasks.pronounce.dictionary import pronunciations
from thalweg.tasks.transduce.serving import StringServant
from thalweg.tasks.transduce.transducer import Transducer


class WordServant(StringServant):
    """Words and sentences; its scores and the words to try come with the package.

    >>> from thalweg.tasks.pronounce.task import TASK
    >>> TASK.serving("english", device="cpu").describe()["examples"][0]
    'Hannah'
    """

    def __init__(self, transducer: Transducer, *args: Any, **options: Any):
        super().__init__(transducer, *args, **options)
        own = Transducer(
            transducer.model, transducer.source, transducer.target, longest=transducer.longest, meta=transducer.meta
        )
        self._alone = StringServant(own, *args, **options)

    @property
    def examined(self) -> StringServant:
        """The model alone, as ``thalweg evaluate`` measures it."""
        return self._alone

    def _warm(self) -> bool:
        pronunciations()  # read once, here rather than for the first caller
        return super()._warm()

    def describe(self) -> dict[str, Any]:
        """What any transducer says, with the figures measured on the stored weights."""
        told = boxed(self.run)
        figures = json.loads((folder_of(self.run) / "figures.json").read_text(encoding="utf-8"))["measured"]
        scores = {split: {"items": facts["items"], **facts["scores"]} for split, facts in figures.items()}
        own = {"scores": scores, "measured": "the model alone, without the dictionary; it reads words in lower case"}
        own |= {} if told is None else {"about": told.about, "examples": told.examples}
        return super().describe() | own
