"""Hostile words, files and streams for the command line, each case in a fork; see ``forks``.

A case calls the entry point with its own ``sys.argv``, in a folder of its own, its standard streams in files or closed.
What must come of it is one line that begins with ``error:`` and exit status 2, and nothing that is half made.
"""

from __future__ import annotations

import hashlib
import os
import random
import resource
import shutil
import string
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from hostile.command_line_tables import (
    BYTES,
    CONFIGS,
    DENSITY_SETTINGS,
    DIGITS,
    FULL,
    HUGE,
    IMAGE_SETTINGS,
    LONG,
    NO_NUMBERS,
    NUMBERS,
    ONE_MB,
    SETTINGS,
    STRANGE,
    TRANSFORMER_SETTINGS,
)

HOME = "THALWEG_HOSTILE"  # names the folder of all cases
TINY = ("hidden=8", "embedding=8", "epochs=1", "batch_size=16", "device=cpu")
MEMORY = 8 << 30  # bytes of addresses that a case may have


@dataclass(frozen=True)
class Case:
    """A command and what surrounds it.

    Attributes:
        words: of the command line; ``@run``, ``@images``, ``@photos`` and ``@pairs.tsv`` stand for what ``warm`` made.
        said: what the line on standard error holds.
        files: written to the case's folder first; before: called there next.
        stdin: what standard input holds; closed: descriptors of standard streams that are closed.
        stdout: what standard output is, instead of a file.
        status: of the exit; none takes 0 as well as 2.
        kept: a folder whose contents must stay as they are.
    """

    words: Sequence[str]
    said: str = ""
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    before: Callable[[], object] | None = None
    stdin: bytes = b""
    closed: tuple[int, ...] = ()
    stdout: str = ""
    status: int | None = 2
    kept: str = ""


def command(words: Sequence[str]) -> int:
    """The exit status of the entry point on these words."""
    from thalweg.cli.main import run

    sys.argv = ["thalweg", *words]
    try:
        run()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    return 0


def perform(case: Case) -> tuple[int, str, str]:
    """Status, standard output and standard error of a case."""
    home = Path(os.environ[HOME])
    folder = Path(tempfile.mkdtemp(dir=home))
    os.chdir(folder)
    for name, content in case.files.items():
        Path(name).write_bytes(content.encode() if isinstance(content, str) else content)
    if case.before is not None:
        case.before()
    words = [str(home / word[1:]) if word.startswith("@") else word for word in case.words]
    streams = [folder.with_suffix(suffix) for suffix in (".in", ".out", ".err")]
    streams[0].write_bytes(case.stdin)
    for number, path in enumerate(streams):
        named = case.stdout if number == 1 and case.stdout else path
        os.dup2(os.open(named, os.O_RDONLY if number == 0 else os.O_CREAT | os.O_WRONLY, 0o600), number)
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", errors="backslashreplace", closefd=False)
    for number in case.closed:
        os.close(number)
        setattr(sys, ("stdin", "stdout", "stderr")[number], None)
    status = command(words)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    out, err = (path.read_text(errors="replace") if path.exists() else "" for path in streams[1:])
    return status, out, err


def check(case: Case) -> None:
    """That a case ends as it must."""
    before = _contents(case.kept)
    status, out, err = perform(case)
    told = f"\nstatus {status}\n{err[-1500:]}\n{out[-500:]}"
    assert "Traceback" not in err + out, told
    assert status == case.status or (case.status is None and status in (0, 2)), told
    if status == 2 and 2 not in case.closed:
        lines = err.splitlines()
        assert [line for line in lines if line.startswith("error: ")] == lines[-1:], told
        assert case.said in lines[-1], told
        assert len(lines[-1]) < 1000, told
        assert case.status is None or case.kept or not Path("run").exists(), f"a run is half made{told}"
    assert _contents(case.kept) == before, f"{case.kept} was changed{told}"


def _contents(name: str) -> dict[str, str]:
    files = Path(os.environ[HOME], name).rglob("*") if name else ()
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files if path.is_file()}


def warm() -> None:
    """Pairs, images, a trained transducer and a trained classifier, made in a fork, which takes its threads away."""
    import pydantic
    import rapidfuzz
    import sacrebleu
    import safetensors.torch
    import yaml

    import thalweg.cli.main
    import thalweg.recipes

    loaded = (pydantic, rapidfuzz, sacrebleu, safetensors, yaml, thalweg)
    assert all(loaded)  # once, instead of once in every case
    thalweg.tasks.build_config({})
    home = Path(os.environ[HOME])
    os.environ |= {"THALWEG_CACHE": str(home / "cache"), "MPLBACKEND": "Agg", "NO_COLOR": "1"}
    os.environ.pop("THALWEG_DATA", None)
    child = os.fork()
    if child == 0:
        os.dup2(os.open(home / "warm", os.O_CREAT | os.O_WRONLY, 0o600), 2)
        os.dup2(2, 1)
        os._exit(_make(home))
    _, status = os.waitpid(child, 0)
    assert status == 0, (home / "warm").read_text()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))


def _make(home: Path) -> int:
    from PIL import Image

    rng = random.Random(0)
    words = ["".join(rng.choices("abcdef", k=rng.randint(2, 6))) for _ in range(60)]
    pairs = home / "pairs.tsv"
    pairs.write_text("".join(f"{word}\t{word[::-1]}\n" for word in words))
    for label, grey in (("dark", 30), ("light", 220)):
        (home / "photos" / label).mkdir(parents=True)
        for n in range(8):
            Image.new("L", (8, 8), grey + n).save(home / "photos" / label / f"{n}.png")
    failed = command(["train", "--data", str(pairs), "--out", str(home / "run"), *TINY])
    small = ["channels=4", "hidden=4", "epochs=1"]
    images = ["train", "--task", "classify", str(home / "photos"), "--out", str(home / "images"), *small]
    return failed or command(images)


TRAIN = ("train", "--data", "@pairs.tsv", "--out", "run", *TINY)
IMAGES = ("train", "--task", "classify", "@photos", "--out", "run", "epochs=1")
DENSITY = ("train", "--task", "density", "x.csv", "--out", "run")
PREDICT = ("predict", "@run", "--text", "abc")


def pairs_as(name: str) -> Callable[[], object]:
    """Puts the pairs into the case's folder under a name."""
    return lambda: shutil.copy(Path(os.environ[HOME], "pairs.tsv"), name)


def images_in_bytes(label: str, name: str) -> None:
    """Images of a class of that name, their names with that ending."""
    shutil.copytree(Path(os.environ[HOME], "photos"), "photos")
    os.makedirs(f"photos/{label}", exist_ok=True)
    for n in range(8):
        shutil.copy("photos/dark/0.png", f"photos/{label}/{n}{name}")


def little_memory() -> None:
    """Leaves the process 100 MB more than it has."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + 100_000_000
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def a_loop() -> None:
    """Names that lead to themselves."""
    for name in ("loop", "loop.yaml", "loop.tsv"):
        os.symlink(name, name)


def _table() -> Iterator[tuple[str, Case]]:
    for words, said in SETTINGS.items():
        yield f"train {words[:60]}", Case([*TRAIN, *_split(words)], said)
    for words, said in TRANSFORMER_SETTINGS.items():
        base = [*TRAIN[:5], "--model", "transformer", "epochs=1"]
        yield f"train transformer {words[:60]}", Case([*base, *_split(words)], said)
    for words, said in IMAGE_SETTINGS.items():
        yield f"train images {words[:60]}", Case([*IMAGES, *_split(words)], said)
    for text, said in CONFIGS.items():
        words = ["train", "c.yaml", "--data", "@pairs.tsv", "--out", "run"]
        yield f"train config {text[:30]!a}{len(text)}", Case(words, said, files={"c.yaml": text})
    for words, said in DENSITY_SETTINGS.items():
        yield f"train density {words[:60]}", Case([*DENSITY, *_split(words)], said, files={"x.csv": NUMBERS})
    for number, (text, said) in enumerate(NO_NUMBERS.items()):
        yield f"train table {number}", Case([*DENSITY, "epochs=1"], said, files={"x.csv": text})
    endless = ["train", "--task", "density", "/dev/zero", "--out", "run"]
    yield "train density endless", Case(endless, "/dev/zero:1: expected less than")
    yield from _of_files()
    yield from _of_predict()
    yield from _of_others()
    yield from _of_streams()


def _split(words: str) -> list[str]:
    """Words at the spaces before a key, which a value may have too."""
    return words.split(" ") if words.count("=") > 1 else [words]


def _of_files() -> Iterator[tuple[str, Case]]:
    train = partial(lambda data, *more: ["train", "--data", data, "--out", "run", *TINY, *more])
    lines = "ab\tba\n" * 30
    long = {"x.tsv": f"{lines}{ONE_MB}\tb\n"}
    yield "train 1 MB source", Case(train("x.tsv"), "x.tsv:31: expected at most 32,768 characters a line", long)
    yield "train 1 MB target", Case(train("x.tsv"), "x.tsv:31:", {"x.tsv": f"{lines}b\t{ONE_MB}\n"})
    yield "train 1 MB dev", Case(train("@pairs.tsv", "--dev", "x.tsv"), "x.tsv:31:", long)
    yield "train endless", Case(train("/dev/zero"), "/dev/zero:1: expected at most 32,768 characters a line")
    yield "train I/O error", Case(train("/proc/self/mem"), "/proc/self/mem: expected a file that can be read")
    yield "train folder", Case(train("/"), "expected a text file, got a folder")
    yield "train long name", Case(train(LONG), "File name too long")
    yield "train long dev", Case(train("@pairs.tsv", "--dev", LONG), "File name too long")
    yield "train long out", Case(["train", "--data", "@pairs.tsv", "--out", LONG, *TINY], "File name too long")
    yield "train long config", Case(["train", f"{LONG}.yaml"], "File name too long")
    yield "train folder as config", Case(["train", "c.yaml"], "c.yaml", before=lambda: os.mkdir("c.yaml"))
    yield "train loop", Case(train("loop.tsv"), "loop.tsv", before=a_loop)
    yield "train loop as config", Case(["train", "loop.yaml"], "loop.yaml", before=a_loop)
    yield (
        "train bytes",
        Case(train(f"{BYTES}.tsv"), "expected UTF-8 on the command line", before=pairs_as(f"{BYTES}.tsv")),
    )
    yield "train no stdin", Case(train("-"), "<stdin>: expected lines of text, got standard input closed", closed=(0,))
    yield "train over a run", Case(["train", "--data", "@pairs.tsv", "--out", "@run", "hidden=1000000000"], kept="run")
    yield "resume long", Case(["train", "--resume", "--out", LONG], "File name too long")
    photos = ["train", "--task", "classify", "photos", "--out", "run", "epochs=1", "channels=4", "hidden=4"]
    words = partial(images_in_bytes, f"caf{BYTES}", ".png")
    yield "train class in bytes", Case(photos, "expected folders named in UTF-8, got `caf\\udcff`", before=words)
    strict = partial(images_in_bytes, "dark", f"{BYTES}.png")
    yield "train image in bytes", Case([*photos, "on_bad=fail"], "its name is not UTF-8", before=strict)


def _of_predict() -> Iterator[tuple[str, Case]]:
    for option, value, said in (
        ("--k", "1000000000", "'--k'"),
        ("--k", HUGE, "'--k'"),
        ("--width", "1000000000", "'--width'"),
        ("--samples", "1000000000", "'--samples'"),
        ("--seed", "9" * 30, "search.sampling_seed must be at most"),
        ("--max-length", "1000000000", "search.max_length must be at most"),
        ("--min-length", "1000000000", "search.min_length must be at most"),
        ("--max-expansions", HUGE, "search.max_expansions must be at most"),
        ("--batch-size", HUGE, "'--batch-size'"),
        ("--length-penalty", "1e308", "search.length_penalty"),
        ("--temperature", "1e-320", "search.temperature"),
        ("--lexicon", LONG, "File name too long"),
        ("--lexicon", "/proc/self/mem", "expected a file that can be read"),
        ("--ensemble", LONG, "File name too long"),
        ("--device", "x" * 1000, "device `x"),
        ("--prefix", BYTES, "expected UTF-8"),
        ("--k", DIGITS, "'--k'"),
    ):
        yield f"predict {option} {value[:30]!a}", Case([*PREDICT, option, value], said)
    yield "predict no stdin", Case(["predict", "@run"], "got standard input closed", closed=(0,))
    yield "predict - no stdin", Case(["predict", "@run", "-"], "got standard input closed", closed=(0,))
    long = {"x.txt": f"ab\n{ONE_MB}\n"}
    yield "predict 1 MB", Case(["predict", "@run", "x.txt"], "x.txt:2: expected at most 32,768 characters", long)
    yield "predict long text", Case(["predict", "@run", "--text", "a" * 100_000], "at most 32,768 characters")
    yield "predict endless", Case(["predict", "@run", "/dev/zero"], "/dev/zero:1:")
    yield "predict I/O error", Case(["predict", "@run", "/proc/self/mem"], "expected a file that can be read")
    yield "predict long run", Case(["predict", LONG], "File name too long")
    yield "predict run is a loop", Case(["predict", "loop", "--text", "a"], "loop", before=a_loop)
    yield "predict bytes", Case(["predict", "@run"], "expected UTF-8", stdin=b"a\xffb\n")
    yield "predict endless image", Case(["predict", "@images", "/dev/zero"], "bytes, got more")
    yield "predict long image", Case(["predict", "@images", LONG], "File name too long")
    cold = ["predict", "@images", "@photos", "--temperature", "1e-320"]
    yield "predict images, cold", Case(cold, "search.temperature must be positive")
    in_bytes = partial(images_in_bytes, "dark", f"{BYTES}.png")
    yield "predict image in bytes", Case(["predict", "@images", "photos"], before=in_bytes, status=0)


def _of_others() -> Iterator[tuple[str, Case]]:
    yield "evaluate full name", Case(["evaluate", "@run", FULL], before=pairs_as(FULL), status=0)
    for name in (LONG, "../x", "..", "a/b"):
        yield f"evaluate --name {name[:9]}", Case(["evaluate", "@run", "@pairs.tsv", "--name", name], kept="run")
    yield "evaluate --k", Case(["evaluate", "@run", "@pairs.tsv", "--k", "1000000000"], "'--k'")
    yield "evaluate no stdin", Case(["evaluate", "@run", "-"], "got standard input closed", closed=(0,))
    yield "evaluate long name", Case(["evaluate", "@run", LONG], "File name too long")
    yield "evaluate images, long", Case(["evaluate", "@images", LONG], "File name too long")
    config = {"c.yaml": "model: {hidden: 8}"}
    for option in ("hidden=1000000000", "encoder_layers=100000", "--symbols=1000000000000", f"--length={HUGE}"):
        yield f"show {option}", Case(["show", "c.yaml", option], files=config)
    yield "show hidden=1000000", Case(["show", "c.yaml", "hidden=1000000"], "GiB of memory", config)
    for option in ("--image=3x100000x100000", f"--image=3x{DIGITS}x4", "--classes=1000000000000"):
        yield f"show {option[:30]}", Case(["show", "c1", option])
    yield "show task", Case(["show", "c.yaml"], "task `['a']` is not known", {"c.yaml": "task: [a]"})
    yield "show long", Case(["show", LONG], "File name too long")
    for option in (f"--steps={HUGE}", f"--rows={HUGE}", "--data=/proc/self/mem", f"--out={LONG}.html", "--data=-"):
        yield f"diagnose {option[:30]}", Case(["diagnose", "@run", option], closed=(0,))
    yield "diagnose long", Case(["diagnose", LONG], "File name too long")
    for words in (["--seeds", HUGE], ["--out", LONG], ["hidden=1000000000"], ["seeds=["]):
        yield f"recipe run demo {words[-1][:30]}", Case(["recipe", "run", "demo", *words])
    for value in (DIGITS, "-1", ".nan"):
        yield f"recipe run {value[:9]}", Case(["recipe", "run", "hopfield-digits", f"stored={value}", "--out", "o"])
    for name in (LONG, "/proc/self/mem", "/dev/zero", f"cmudict:{LONG}"):
        yield f"data check {name[:30]}", Case(["data", "check", name])
    for words in ([LONG], ["/dev/zero"], ["@pairs.tsv", "--audit", HUGE], ["@pairs.tsv", "--save", LONG]):
        yield f"align {words[-1][:20]}", Case(["align", *words])
    yield "align other", Case(["align", "@pairs.tsv", "--aligner", "x"], "a whole safetensors file", {"x": "not one"})
    yield "data root long", Case(["data", "list", "--data-root", LONG], "File name too long")
    space = "data: {train: x.tsv}\nsweep: {space: {hidden: [8]}, "
    for text in (
        f"trials: {'9' * 30}",
        f"seeds: [{'9' * 30}]",
        f"seed: {'9' * 30}",
        "space: {hidden: 8}",
    ):
        yield f"sweep {text[:20]}", Case(["sweep", "c.yaml", "--out", "o"], files={"c.yaml": f"{space}{text}}}"})
    ends = f"data: {{train: x.tsv}}\nsweep: {{space: {{hidden: {{low: 1, high: 1{'0' * 400}}}}}}}"
    yield "sweep ends", Case(["sweep", "c.yaml", "--out", "o"], "`high` must be a number", {"c.yaml": ends})
    yield "sweep --workers", Case(["sweep", "c.yaml", "--workers", "100000"], "'--workers'", {"c.yaml": f"{space}}}"})
    yield "long command", Case(["x" * 100_000], "no such command")
    yield "bytes as option", Case([f"--{BYTES}"], "expected UTF-8")


def _of_streams() -> Iterator[tuple[str, Case]]:
    yield "no stdout", Case(PREDICT, closed=(1,), status=0)
    yield "no stderr", Case(["predict", "absent"], closed=(2,))
    yield "no streams", Case(PREDICT, closed=(0, 1, 2), status=0)
    yield "full stdout", Case(PREDICT, "standard output, or a file: No space left on device", stdout="/dev/full")
    wide = ["show", "c1", "head=average", "--image", "3x1000x1000"]
    yield "memory runs out", Case(wide, "expected enough memory for", before=little_memory)


CASES: dict[str, Callable[[], None]] = {name: partial(check, case) for name, case in _table()}


def at_random(seed: int) -> None:
    """A command with some settings or options of strange values: it does its work or says in a line why not."""
    rng = random.Random(seed)
    kinds = [_random_training, _random_images, _random_options, _random_config]
    check(rng.choice(kinds)(rng))


def _random_training(rng: random.Random) -> Case:
    from thalweg.tasks.config import as_settings
    from thalweg.tasks.registry import build_config

    family = rng.choice([{"hidden": 8, "embedding": 8}, {"width": 8, "heads": 2, "feedforward": 8}])
    small = [f"model.{key}={value}" for key, value in family.items()]
    return _random_words(rng, [*TRAIN[:5], *small, "epochs=1"], as_settings(build_config({"model": family})))


def _random_images(rng: random.Random) -> Case:
    from thalweg.tasks.classify.config import ClassifyConfig
    from thalweg.tasks.config import as_settings

    return _random_words(rng, [*IMAGES, "channels=4", "hidden=4"], as_settings(ClassifyConfig()))


def _random_words(rng: random.Random, words: list[str], settings: dict) -> Case:
    keys = [f"{section}.{key}" for section, values in settings.items() if isinstance(values, dict) for key in values]
    chosen = [key for key in rng.sample(keys, rng.randint(1, 3)) if key != "training.epochs"]
    return Case([*words, *(f"{key}={rng.choice(STRANGE)}" for key in chosen)], status=None)


def _random_options(rng: random.Random) -> Case:
    options = (
        *("k", "max-length", "min-length", "lexicon", "prefix", "width", "length-penalty", "groups", "diversity"),
        *("max-expansions", "temperature", "top-p", "top-k", "typical", "min-p", "samples", "seed", "device"),
    )
    command = rng.choice([["predict", "@run", "@pairs.tsv"], ["evaluate", "@run", "@pairs.tsv"]])
    search = rng.choice(["beam", "greedy", "diverse", "exact", "nucleus", "typical", "min-p", "sample", "stochastic"])
    given = [f"--{name}={rng.choice(STRANGE)}" for name in rng.sample(options, rng.randint(1, 2))]
    return Case([*command, "--search", search, *given], status=None)


def _random_config(rng: random.Random) -> Case:
    marks = "{}[]:,&*!|>#-?'\"%@`\n\t \0\ufeff" + string.ascii_letters
    text = "model: {hidden: 8}\ntraining: {epochs: 1}\n"
    for _ in range(rng.randint(1, 8)):
        place = rng.randrange(len(text))
        text = text[:place] + rng.choice([*marks, "task: ", "<<: ", "\n- "]) + text[place + rng.randint(0, 3) :]
    words = ["train", "c.yaml", "--data", "@pairs.tsv", "--out", "run", "epochs=1"]
    return Case(words, files={"c.yaml": text}, status=None)
