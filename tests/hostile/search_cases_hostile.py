"""Searches that are given what nobody should: sources, settings and weights that compiled code would follow.

A case passes where the answer is that of the ordinary search, which is plain PyTorch, or a ``ThalwegError`` of one
line. Run by :mod:`forks`, each in a process of its own.
"""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from hostile.forks import refused
from thalweg.energies import Seq2Seq, Seq2SeqConfig, Transformer, TransformerConfig
from thalweg.errors import ThalwegError
from thalweg.inference import (
    Hypotheses,
    TableModel,
    Trie,
    beam_search,
    exact_search,
    greedy,
    sample_sequences,
    stochastic_beam_search,
)
from thalweg.layers.padded import Padded

SYMBOLS, SAID = 11, 9
SEARCHES: dict[str, Callable[..., Hypotheses]] = {
    "greedy": partial(greedy, max_length=5),
    "beam": partial(beam_search, width=3, max_length=5),
    "exact": partial(exact_search, max_length=4, max_expansions=20),
    "samples": partial(sample_sequences, n=2, max_length=5),
    "stochastic": partial(stochastic_beam_search, n=2, max_length=5),
}
NAN, INF = math.nan, math.inf


@cache
def model_of(kind: str) -> Any:
    """A small model in evaluation mode; every case has a process of its own, so that it may be spoiled."""
    torch.manual_seed(3)
    if kind.startswith("transformer"):
        positions = kind.partition(" ")[2] or "sinusoidal"
        shape: Any = {"width": 16, "heads": 2, "feedforward": 24, "encoder_layers": 1, "decoder_layers": 1}
        config = TransformerConfig(**shape, positions=positions, max_positions=20)
        model: Any = Transformer(config, source_size=SYMBOLS, target_size=SAID)
    else:
        cell, _, attention = kind.partition(" ")
        shape = {"embedding": 8, "hidden": 9, "attention": attention or "additive"}
        model = Seq2Seq(Seq2SeqConfig(cell=cell, **shape), source_size=SYMBOLS, target_size=SAID)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.eval()


def source(lengths: tuple[int, ...] = (4, 2), seed: int = 0) -> Padded:
    count = torch.tensor(lengths)
    mask = torch.arange(max(lengths)) < count[:, None]
    tokens = torch.randint(4, SYMBOLS, mask.shape, generator=torch.Generator().manual_seed(seed))
    return Padded(tokens.where(mask, 1), count, mask)


def outcome(call: Callable[[], Hypotheses]) -> Hypotheses | str:
    try:
        return call()
    except ThalwegError as error:
        return str(error).partition(",")[0]


def same(one: Hypotheses | str, other: Hypotheses | str) -> None:
    if isinstance(one, str) or isinstance(other, str):
        assert one == other, (one, other)
        return
    assert one.tokens.tolist() == other.tokens.tolist()
    torch.testing.assert_close(one.scores, other.scores, atol=2e-4, rtol=2e-4, equal_nan=True)


def usable(model: Any) -> None:
    """The model searches as ever."""
    same(beam_search(model, source(), width=3, max_length=5), ordinary(model, source()))


def ordinary(model: Any, inputs: Any, width: int = 3) -> Hypotheses:
    """A limit on the rows is a wish that only the ordinary search knows."""
    return beam_search(model, inputs, width=width, max_length=5, rows_at_once=999)


def _wrong_sources() -> dict[str, tuple[Callable[[], Any], tuple[str, ...]]]:
    def tokens(value: int) -> Padded:
        made = source()
        made.tokens[0, 2] = value
        return made

    def lengths(*values: int) -> Padded:
        return source()._replace(lengths=torch.tensor(values))

    wrong: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {}
    for value in (-1, SYMBOLS, 50, 10**9, -(10**9), 2**62):
        wrong[f"symbol {value}"] = (partial(tokens, value), ("`tokens`", str(value), "item 0, position 2"))
    for value in (5, 9, 0, -1, 10**6, 2**62):
        wrong[f"length {value}"] = (partial(lengths, value, 2), ("`lengths`", "1 ... 4", str(value), "item 0"))
    wrong |= {
        "width 0": (
            lambda: Padded(torch.empty(2, 0).long(), torch.ones(2).long(), torch.ones(2, 0).bool()),
            ("(2, 0)",),
        ),
        "no mask of its lengths": (lambda: source()._replace(mask=source().mask.roll(1, 1)), ("`mask`",)),
        "mask of numbers": (lambda: source()._replace(mask=source().mask.float()), ("torch.float32",)),
        "symbols that are fractions": (lambda: source()._replace(tokens=source().tokens / 2), ("torch.float32",)),
        "lengths that are fractions": (lambda: source()._replace(lengths=torch.tensor([4.0, 2.0])), ("int64",)),
        "fewer lengths": (lambda: source()._replace(lengths=torch.tensor([4])), ("(2, 4), (1,), (2, 4)",)),
        "three axes": (lambda: source()._replace(tokens=torch.ones(2, 4, 1).long()), ("(2, 4, 1)",)),
        "a tensor": (lambda: source().tokens, ("Padded", "Tensor")),
        "a tuple": (lambda: tuple(source()), ("Padded", "tuple")),
    }
    return wrong


def _source_case(kind: str, group: str) -> None:
    model, target = model_of(kind), source((2, 2))
    for name, (make, words) in _wrong_sources().items():
        if (name.split()[0] if name.split()[0] in ("symbol", "length") else "others") == group:
            for search in SEARCHES.values():
                refused(lambda search=search, make=make: search(model, make()), *words)
            refused(lambda make=make: model.begin(make()), *words)
            refused(lambda make=make: model(make(), target), *words)
            usable(model)


def _layout_case(kind: str) -> None:
    """Sources that are no run of numbers, shared or of a smaller type are what they say."""
    model, plain = model_of(kind), source((4, 4))
    wanted = beam_search(model, plain, width=3, max_length=5)
    wide = Padded(*(part.repeat_interleave(2, 0)[::2] for part in plain))
    turned = plain._replace(tokens=plain.tokens.t().contiguous().t(), mask=plain.mask.t().contiguous().t())
    short = plain._replace(tokens=plain.tokens.int(), lengths=plain.lengths.int())
    for other in (wide, turned, short):
        same(beam_search(model, other, width=3, max_length=5), wanted)
    one = Padded(*(part[:1] for part in plain))
    spread = Padded(one.tokens.expand(3, 4), one.lengths.expand(3), one.mask.expand(3, 4))
    found = beam_search(model, spread, width=3, max_length=5)
    assert found.tokens.tolist() == beam_search(model, one, width=3, max_length=5).tokens.tolist() * 3
    empty = Padded(torch.empty(0, 4).long(), torch.empty(0).long(), torch.empty(0, 4).bool())
    assert beam_search(model, empty, width=3, max_length=5).tokens.shape == (0, 3, 0)


def _mutation_case(kind: str) -> None:
    """Lengths and symbols are followed as they were when the search began."""
    model, given = model_of(kind), source()
    with torch.no_grad():
        wanted = beam_search(model, source(), width=3, max_length=5, rows_at_once=9)
        state = model.begin(given)
        given.lengths.fill_(10**6)
        given.tokens.fill_(10**9)
        given.mask.fill_(True)
        bos = torch.full((2,), model.bos)
        first, state = model.step(bos, state)
        again, _ = model.step(bos, model.begin(source()))
        assert torch.equal(first, again)
        model.step(first.argmax(1), state)

        spoiled = source()

        def spoil(_: object) -> None:
            spoiled.lengths.fill_(10**6)
            spoiled.tokens.fill_(10**9)

        same(beam_search(model, spoiled, width=3, max_length=5, on_step=spoil), wanted)
    refused(lambda: beam_search(model, spoiled, width=3, max_length=5), "`lengths`")
    usable(model)


def _weights_case(kind: str) -> None:
    """A diverged model shows, in whichever parameter."""
    model, given = model_of(kind), source()
    for name, parameter in model.named_parameters():
        flat = parameter.data.view(-1)
        for place, value in ((0, INF), (flat.numel() // 2, -INF), (flat.numel() - 1, NAN)):
            before = flat[place].clone()
            flat[place] = value
            compiled = outcome(lambda: beam_search(model, given, width=2, max_length=4))
            plain = outcome(lambda: beam_search(model, given, width=2, max_length=4, rows_at_once=99))
            try:
                same(compiled, plain)
            except AssertionError as error:
                raise AssertionError(f"{name}[{place}] = {value}: {error}") from error
            flat[place] = before
    usable(model)


def _layouts_of_weights(kind: str) -> None:
    """Weights of other types, strides or none of their own are not read as if they were runs of float32."""
    model = model_of(kind)
    for parameter in model.parameters():
        kept = parameter.data
        layouts = [kept.reshape(-1)[:1].expand(kept.shape), *(kept.to(d) for d in (torch.float64, torch.bfloat16))]
        for layout in [*layouts, kept.t().contiguous().t()] if kept.dim() == 2 else layouts:
            parameter.data = layout
            answers = []
            for rows in (None, 99):
                try:
                    answers.append(beam_search(model, source(), width=2, max_length=4, rows_at_once=rows))
                except (RuntimeError, ValueError) as error:  # PyTorch's own, of types that do not go together
                    answers.append(str(error)[:30])
            same(*answers)
        parameter.data = kept
    usable(model)


def _overflow_case() -> None:
    """Activations whose squares overflow are no zeros after a norm: what has diverged is told."""
    model = model_of("transformer")
    with torch.no_grad():
        model.target_embedding.weight[:, 3] = 1e30
    refused(lambda: beam_search(model, source(), width=2, max_length=4), "NaN")


HUGE = (10**9, 10**18, 10**30)
SETTINGS: dict[str, tuple[str, ...]] = {
    "greedy": ("max_length",),
    "beam": ("max_length", "width", "k"),
    "exact": ("max_length", "width"),
    "samples": ("max_length", "n", "top_k"),
    "stochastic": ("max_length", "n"),
}


def _whole_number_case(search: str) -> None:
    """What is no number of at least 1 is refused; what is huge is refused or answered, without being made room for."""
    call, model = SEARCHES[search], model_of("lstm")
    for setting in SETTINGS[search]:
        for value in (0, -1, True, 1.5, NAN, INF, "3", [3], *((None,) if setting not in ("k", "top_k") else ())):
            refused(lambda name=setting, value=value: call(model, source(), **{name: value}), setting, "at least 1")
    with torch.no_grad():
        model.output.bias[model.eos] += 50  # ends at once, whatever the length may be
    for setting in SETTINGS[search]:
        for value in HUGE:
            with contextlib.suppress(ThalwegError):
                call(model, source(), **{setting: value})
    usable(model)


def _huge_case() -> None:
    """What cannot be held is refused by its name before room is asked for."""
    for search, given, word in (
        ("beam", {"width": 10**10}, "`width` = 10000000000"),
        ("beam", {"width": 10**10, "k": 10**10}, "`k`"),
        ("samples", {"max_length": 10**11}, "`max_length`"),
        ("samples", {"n": 10**11}, "`n`"),
        ("stochastic", {"n": 10**11}, "`n`"),
    ):
        call = partial(SEARCHES[search], model_of("lstm"), source(), **given)
        refused(call, "must fit into memory", "GB", word)


def _real_number_case() -> None:
    for search, setting, wrong in (
        ("beam", "length_penalty", (INF, None, 1e300, -17)),
        ("beam", "diversity", (INF, None, -1)),
        ("samples", "temperature", (0, -1, INF, None)),
        ("samples", "top_p", (0, -1, 1.5, INF)),
        ("samples", "typical", (0, -1, 1.5, INF)),
        ("samples", "min_p", (-1, 1.5, INF)),
        ("stochastic", "temperature", (0, -1, INF, None)),
    ):
        for value in (*wrong, NAN, "1", [1.0], True, 10**400, torch.ones(2)):
            call = partial(SEARCHES[search], model_of("lstm"), source(), **{setting: value})
            refused(call, f"`{setting}`")
    usable(model_of("lstm"))


def _limits_case() -> None:
    tensor = torch.tensor
    prefixes = [[[4]], tensor([[4.0]] * 2), *(tensor([[symbol]] * 2) for symbol in (SAID, -2, 10**12))]
    prefixes += [torch.ones(2, 1).bool(), torch.ones(3, 1).long(), tensor([[-1, 4]] * 2), tensor([[3]] * 2)]
    masks = (None, [True], torch.ones(2, SAID), torch.ones(2, 99).bool(), torch.ones(SAID).bool())
    for model in map(model_of, ("lstm", "transformer learned")):
        for name in ("greedy", "beam", "exact", "samples"):
            call = partial(SEARCHES[name], model, source())
            for prefix in prefixes:
                refused(partial(call, prefix=prefix), "`prefix`")
            for mask in masks:
                refused(partial(call, allowed=lambda *_, mask=mask: mask), "`allowed`")
            refused(partial(call, allowed=3), "`allowed`", "int")
            for least in (-1, 99, 1.5, True, None, NAN):
                refused(partial(call, min_length=least), "`min_length`")
        refused(partial(beam_search, model, source(), width=3, max_length=5, on_step=3), "`on_step`")
    refused(lambda: Trie([[10**12]], vocab_size=SAID, eos=3), "`sequences`")
    refused(lambda: greedy(TableModel({}, vocab_size=3, bos=0), [0], max_length=2), "`inputs`")


def _positions_case() -> None:
    """Learned positions end somewhere; no search reads beyond them."""
    model = model_of("transformer learned")
    with torch.no_grad():
        model.output.bias[model.eos] -= 50
    for search in (greedy, partial(beam_search, width=2)):
        refused(lambda search=search: search(model, source(), max_length=10**9), "learned positions reach 20")
    long = source((21, 2))
    refused(lambda: greedy(model, long, max_length=4), "learned positions reach 20")


def _ends_case(kind: str) -> None:
    """The symbols a search begins and ends with are looked up, too."""
    model = model_of(kind)
    for name in ("bos", "eos"):
        kept = getattr(model, name)
        for value in (-1, SAID, 10**9):
            setattr(model, name, value)
            refused(lambda: beam_search(model, source(), width=3, max_length=5), f"`model.{name}`", str(value))
        setattr(model, name, kept)
    usable(model)


def _threads_case(kind: str) -> None:
    """Several threads, some of which ask for what is refused, disturb nobody."""
    torch.set_num_threads(2)
    model, wrong = model_of(kind), _wrong_sources()
    inputs = [source(lengths, seed) for seed, lengths in enumerate(((4, 2), (3, 3), (7, 1, 2), (2,)))]
    wanted = [ordinary(model, given) for given in inputs]
    failed: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(6):
                at = (number + turn) % len(inputs)
                same(beam_search(model, inputs[at], width=3, max_length=5), wanted[at])
                refused(lambda: beam_search(model, wrong["symbol 1000000000"][0](), width=3, max_length=5), "`tokens`")
        except BaseException as error:  # told to the thread that waits
            failed.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed


def _interrupt_case(kind: str) -> None:
    """A search that an exception ends in the middle leaves the model, and what is kept for it, as they were."""
    model = model_of(kind)
    usable(model)

    def stop(*_: object, **__: object) -> Tensor:
        raise KeyboardInterrupt

    for options in ({"on_step": stop}, {"allowed": stop}):
        with contextlib.suppress(KeyboardInterrupt):
            beam_search(model, source(), width=3, max_length=5, **options)
        usable(model)
    with torch.no_grad():
        model.output.bias[model.eos] = -INF  # never ends by itself
    before = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        began = time.monotonic()
        with contextlib.suppress(KeyboardInterrupt):  # inside the compiled search, between two of its steps
            for _ in range(1000):
                beam_search(model, source(), width=5, max_length=2000)
        assert time.monotonic() - began < 60
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    with torch.no_grad():
        model.output.bias[model.eos] = 0.0
    usable(model)


KINDS = ("lstm", "gru dot", "transformer")
CASES: dict[str, Callable[[], None]] = {}
for _kind in ("lstm", "transformer"):
    for _group in ("symbol", "length", "others"):
        CASES[f"{_kind}: {_group}"] = partial(_source_case, _kind, _group)
    CASES[f"{_kind}: bos and eos"] = partial(_ends_case, _kind)
    CASES[f"{_kind}: threads"] = partial(_threads_case, _kind)
    CASES[f"{_kind}: interrupted"] = partial(_interrupt_case, _kind)
for _kind in KINDS:
    CASES[f"{_kind}: layouts"] = partial(_layout_case, _kind)
    CASES[f"{_kind}: mutated"] = partial(_mutation_case, _kind)
    CASES[f"{_kind}: layouts of weights"] = partial(_layouts_of_weights, _kind)
    CASES[f"{_kind}: weights"] = partial(_weights_case, _kind)
for _search in SETTINGS:
    CASES[f"{_search}: whole numbers"] = partial(_whole_number_case, _search)
CASES |= {
    "huge settings": _huge_case,
    "real numbers": _real_number_case,
    "limits": _limits_case,
    "learned positions": _positions_case,
    "overflow": _overflow_case,
}


def at_random(seed: int) -> None:
    """A model of any kind, a source with any defect or none, any search: the ordinary answer or a refusal."""
    draw = torch.Generator().manual_seed(seed)

    def pick(choices: Any) -> Any:
        choices = list(choices)
        return choices[int(torch.randint(len(choices), (1,), generator=draw))]

    cells = (f"{cell} {score}" for cell in ("lstm", "gru", "gru-reset-before") for score in ("none", "dot", "general"))
    model = model_of(pick((*cells, "lstm", "transformer", "transformer rotary", "transformer learned")))
    lengths = tuple(torch.randint(1, 9, (pick((1, 2, 5)),), generator=draw).tolist())
    given, width, value = source(lengths, seed), pick((1, 2, 7)), pick((-1, 0, 3, 12, 10**6, 10**9, 2**62))
    part = pick(("nothing", "tokens", "lengths", "weights"))
    if part in ("tokens", "lengths"):
        flat = getattr(given, part).view(-1)
        flat[int(torch.randint(flat.numel(), (1,), generator=draw))] = value
    if part == "weights":
        flat = pick(model.parameters()).data.view(-1)
        flat[int(torch.randint(flat.numel(), (1,), generator=draw))] = pick((NAN, INF, -INF))
    found = outcome(lambda: beam_search(model, given, width=width, max_length=5))
    same(found, outcome(lambda: ordinary(model, given, width)))


def warm() -> None:
    """Compile what the cases share."""
    for kind in KINDS:
        usable(model_of(kind))
    _overflow_case()
    model_of.cache_clear()
