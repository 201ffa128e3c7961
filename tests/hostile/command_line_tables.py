"""Hostile settings and configs, and what is said of each; see ``command_line_cases``."""

from __future__ import annotations

LONG = "x" * 300  # longer than a name may be
FULL = "n" * 255  # as long as a name may be
HUGE = "1" + "0" * 20
DIGITS = "1" * 5000
DEEP = "[" * 3000
LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 10)}]\n" for n in range(9)
)
BYTES = "\udcff"  # what Python makes of a byte that is no UTF-8
ONE_MB = "a" * 1_000_000

# `key=value` words of `train`, and what is said.
SETTINGS = {
    "hidden=1000000000": "model.hidden must be at most 1,048,576, got 1000000000",
    "hidden=100000000000000000000": "model.hidden must be at most",
    "hidden=1000000": "GiB of memory, got",
    "encoder_layers=100000": "model.encoder_layers must be at most 1,000",
    "decoder_layers=100000": "model.decoder_layers must be at most 1,000",
    "seed=99999999999999999999999": "training.seed must be at most",
    "threads=100000": "training.threads must be at most",
    "threads=4000": "on this machine, got 4000",
    f"batch_size={HUGE}": "training.batch_size must be at most",
    f"batch_tokens={HUGE}": "training.batch_tokens must be at most",
    f"epochs={HUGE}": "training.epochs must be at most",
    f"warmup={HUGE}": "training.warmup must be at most",
    "loss=risk loss_width=1000000000": "training.loss_width must be at most",
    "search.max_length=1000000000": "search.max_length must be at most 32,768",
    "min_length=1000000000": "search.min_length must be at most",
    "search.width=1000000000": "search.width must be at most 10,000",
    "search.samples=1000000": "search.samples must be at most 1,000",
    "sampling_seed=99999999999999999999": "search.sampling_seed must be at most",
    f"max_expansions={HUGE}": "search.max_expansions must be at most",
    "length_penalty=1e+300": "search.length_penalty must be from -10 to 10",
    "temperature=1e-300": "search.temperature must be positive",
    f"hidden={DIGITS}": "`model.hidden`",
    f"hidden={DEEP}": "`model.hidden`",
    "hidden=2001-99-99": "`model.hidden`",
    'hidden=!!int ""': "`model.hidden`",
    "hidden=&a [*a]": "`model.hidden`",
    f"cell={'x' * 100_000}": "`model.cell`",
    f"{'x' * 100_000}=1": "xxx",
    f"lexicon={LONG} search.search=beam": "File name too long",
}
TRANSFORMER_SETTINGS = {
    "model.width=1000000": "GiB of memory, got",
    "feedforward=100000000000": "model.feedforward must be at most",
    "positions=learned max_positions=100000000000": "model.max_positions must be at most",
    "encoder_layers=100000": "model.encoder_layers must be at most",
}
IMAGE_SETTINGS = {
    "size=100000": "data.size must be pixels of a side, or height and width, at most 8,192, got 100000",
    f"size={HUGE}": "data.size must be",
    "workers=100000": "data.workers must be at most",
    f"split_seed={HUGE}": "data.split_seed must be at most",
    "channels=1000000,1000000": "GiB of memory, got",
    "channels=100000000": "model.channels must hold numbers",
    "units=1000000": "model.units must give at most 1,000 layers",
    "convolutions=1000000": "model.convolutions must be at most",
    "kernel=100001": "model.kernel must be odd",
    "hidden=100000000000": "model.hidden must hold numbers",
    "expansion=1e+300": "model.expansion must be at most",
    f"squeeze={HUGE}": "model.squeeze must be at most",
    f"cutout={HUGE}": "`cutout` of the augmentation must be",
    "scale=1e+300": "`scale` of the augmentation must be",
    "crop=1000000000": "augment.crop must be at most",
}
NUMBERS = "a,b\n" + "".join(f"{n},{n * n % 7}\n" for n in range(30))
# `key=value` words of `train --task density` on those numbers, and what is said.
DENSITY_SETTINGS = {
    "components=1000000000": "model.components must be at most",
    "components=1000": "expected at least 1,000 rows to learn from for components=1000",
    "floor=.nan": "model.floor",
    "covariance=x": "model.covariance",
    "held_out=1": "data.held_out must be in (0, 1)",
    "sequence=c": "expected a column `c`",
    f"restarts={HUGE}": "training.restarts must be at most",
    "family=hmm states=1000000": "expected enough memory for 7,450.6 GiB more",
    "family=hmm components=1000000": "`n_mix` must be at most the number of observations",
    "family=hmm topology=x": "model.topology",
    "family=vae latent=1000000000": "model.latent must be at most",
    "family=vae hidden=1000000,1000000": "GiB of memory, got",
}
# Tables that are none, and what is said.
NO_NUMBERS = {
    "": "got an empty file",
    "a,b\n": "got a heading alone",
    "a,b\n1,x\n": "x.csv:2: expected a number in column 2",
    "a,b\n1,2,3\n": "x.csv:2: expected 2 cells",
    "a,a\n1,2\n": "got `a` twice",
    "a,b\n1,inf\n": "x.csv:2: expected a number in column 2",
    "a,b\n" + "nan,1\n" * 20: "expected numbers in column `a`, got none",
    "a,b\n" + "".join(f"{n}e300,{n}\n" for n in range(20)): "whose squares are finite in column `a`",
}
# Config files, and what is said.
CONFIGS = {
    f"data: {DEEP}{']' * 3000}": "c.yaml: expected YAML, got something else (nested more than 32 deep)",
    f"data: {'[' * 100}{']' * 100}": "nested more than 32 deep",
    f"training: {{seed: {DIGITS}}}": "c.yaml: expected YAML",
    "training: {seed: 2001-99-99}": "c.yaml: expected YAML",
    "training: {seed: !!timestamp x}": "c.yaml: expected YAML",
    "task: [a]": "c.yaml: task `['a']` is not known",
    "task: {a: 1}": "c.yaml: task",
    "model: {family: [a]}": "model.family `['a']` is not known",
    f"{LAUGHS}model: {{hidden: *a9}}": "more than 100,000 values",
    "model: &a {hidden: *a}": "nested more than 32 deep",
    "model: {hidden: 8}\nmodel: {hidden: 9}": "c.yaml:2: expected YAML, got something else (the key `model` a second",
    "model:\n  hidden: 8\n  hidden: 9\n": "c.yaml:3:",
    f"# {ONE_MB}{ONE_MB}\n": "expected at most 1,048,576 characters",
    "model: \0": "c.yaml: expected YAML",
    'data: {dev: "\\ud800"}': "a character that is no text",
    "1: 2": "`1` is not a setting",
    "? [a]\n: 2": "c.yaml:1: expected YAML",
    "training: {epochs: .inf}": "`training.epochs`",
    "training: {metric: [a]}": "`training.metric`",
    "data: {dev: [a]}": "`data.dev`",
}
# Values that no setting is made for; what a setting takes of them is a short piece of work.
STRANGE = (
    *("", "null", "true", ".nan", ".inf", "-.inf", "-1", "0", "-0.0", "1e-300", "1e+300", HUGE, "-" + HUGE),
    *(str(2**31), str(2**63), str(2**64), "[]", "[a]", "{}", "{a: 1}", "[[1]]", "0x10", "1_0", "1:30", "٣", "'"),
    *('"\\0"', '"\\ud800"', "2001-99-99", "!!binary x", "&a [*a]", "*a", DIGITS, DEEP, "x" * 10_000, LONG, "/", "-"),
)
