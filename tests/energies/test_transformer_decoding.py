"""Decoding with a Transformer: both paths equal the forced pass, rows move freely, states are values."""

import itertools

import pytest
import torch

from thalweg.data import pad
from thalweg.energies import Transformer, TransformerConfig
from thalweg.errors import ShapeError
from thalweg.inference import beam_search, greedy, sample_sequences
from thalweg.layers.low_precision import reduce_precision

KINDS = ["encoder-decoder", "causal"]
POSITIONS = ["sinusoidal", "learned", "rotary"]
ACTIVATIONS = ["relu", "gelu", "silu", "swiglu"]
VOCABULARY = 8
SOURCES = [[4, 5, 6, 7], [8], [5, 4, 4]]
TARGETS = [[4, 5], [6, 6, 5], []]


def build(seed=0, *, features=(), dtype=torch.float64, **settings):
    torch.manual_seed(seed)
    small = {"width": 8, "heads": 2, "feedforward": 12, "encoder_layers": 1, "decoder_layers": 2, "dropout": 0.0}
    config = TransformerConfig(**(small | settings))
    copies = torch.tensor([-1, -1, -1, -1, 4, 5, -1, 7, -1, 6]) if config.pointer else None
    model = Transformer(config, source_size=10, target_size=VOCABULARY, features=features, copies=copies)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.3)
    return model.to(dtype).eval()


def feed(model, state, columns):
    """Feed rows of symbols column by column; all answers and the last state."""
    answers = []
    for column in columns:
        log_probs, state = model.step(torch.tensor(column), state)
        answers.append(log_probs)
    return torch.stack(answers, dim=1), state


def forced(model, sources, prefixes):
    """What follows bos and each prefix (all of one length), from the forced pass alone."""
    source = pad(sources)
    target = pad([[*prefix, 3] for prefix in prefixes])
    return model.normalise(model(source, target))


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("pointer", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("kind", KINDS)
def test_step_by_step_equals_the_forced_pass(kind, norm, positions, activation, pointer, gradients):
    model = build(kind=kind, norm=norm, positions=positions, activation=activation, pointer=pointer, features=(6,))
    prefixes = [[4, 5, 7], [6, 6, 5], [7, 4, 4]]
    with torch.set_grad_enabled(gradients):
        expected = forced(model, SOURCES, prefixes)
        columns = [[2, 2, 2], *([prefix[t] for prefix in prefixes] for t in range(3))]
        found, _ = feed(model, model.begin(pad(SOURCES)), columns)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    "settings",
    [{"embedding_norm": True}, {"embedding_scale": False}, {"output_bias": False}, {"tied": False}, {"heads": 1}],
)
@pytest.mark.parametrize("kind", KINDS)
def test_every_setting_steps_as_the_forced_pass(kind, settings):
    model = build(kind=kind, **settings)
    with torch.no_grad():
        found, _ = feed(model, model.begin(pad(SOURCES)), [[2, 2, 2], [4, 5, 6]])
        torch.testing.assert_close(found, forced(model, SOURCES, [[4], [5], [6]]), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_may_be_repeated_dropped_and_mixed(kind, gradients):
    model = build(kind=kind, pointer=True)
    with torch.set_grad_enabled(gradients):
        _, state = feed(model, model.begin(pad(SOURCES)), [[2, 2, 2], [4, 5, 6]])
        past = [[4], [5], [6]]
        for rows in ([0, 0, 1, 1, 2, 2], [2, 2, 0], [1], [0, 1, 0, 1], [2, 1, 0], []):
            tokens = torch.tensor([4, 5, 6, 7, 5, 6][: len(rows)], dtype=torch.long)
            chosen = model.select(state, torch.tensor(rows, dtype=torch.long))
            found, _ = model.step(tokens, chosen)
            assert found.shape == (len(rows), VOCABULARY)
            for n, row in enumerate(rows):
                expected = forced(model, [SOURCES[row]], [[*past[row], int(tokens[n])]])[0, -1]
                torch.testing.assert_close(found[n], expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_long_random_walk_of_steps_and_selections(kind):
    """Thirty-odd steps: buffers grow, split and shrink; every row equals its own prefix run anew."""
    model = build(kind=kind, positions="rotary")
    generator = torch.Generator().manual_seed(0)
    state = model.begin(pad(SOURCES))
    items, prefixes, tokens = [0, 1, 2], [[], [], []], torch.full((3,), 2)
    for t in range(36):
        log_probs, state = model.step(tokens, state)
        if t % 6 == 0:
            for row, (item, prefix) in enumerate(zip(items, prefixes, strict=True)):
                expected = forced(model, [SOURCES[item]], [prefix])[0, -1]
                torch.testing.assert_close(log_probs[row], expected, rtol=1e-9, atol=1e-9)
        size = int(torch.randint(1, 9, (1,), generator=generator))
        rows = torch.randint(0, len(items), (size,), generator=generator)
        tokens = torch.randint(4, VOCABULARY, (size,), generator=generator)
        state = model.select(state, rows)
        items = [items[r] for r in rows.tolist()]
        prefixes = [[*prefixes[r], v] for r, v in zip(rows.tolist(), tokens.tolist(), strict=True)]


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_states_are_values(kind, gradients):
    model = build(kind=kind)
    with torch.set_grad_enabled(gradients):
        start = model.begin(pad(SOURCES))
        _, early = feed(model, start, [[2, 2, 2], [4, 5, 6]])
        first, later = model.step(torch.tensor([5, 5, 5]), early)
        beyond, _ = model.step(torch.tensor([7, 6, 4]), later)
        # Another way from the same state, then the old ones once more.
        other, _ = feed(model, model.select(early, torch.tensor([2, 0, 0, 1])), [[4, 6, 7, 4], [5, 5, 5, 5]])
        again, _ = model.step(torch.tensor([5, 5, 5]), early)
        beyond_again, _ = model.step(torch.tensor([7, 6, 4]), later)
        assert torch.equal(first, again)
        torch.testing.assert_close(beyond, beyond_again, rtol=1e-12, atol=1e-12)
        expected = forced(model, [SOURCES[0]], [[4, 6, 5]])[0, -1]
        torch.testing.assert_close(other[1, -1], expected, rtol=1e-10, atol=1e-10)
        # The state that `begin` gave may be cut into pieces.
        for piece in ([1], [2, 0]):
            found, _ = feed(model, model.select(start, torch.tensor(piece)), [[2] * len(piece), [4] * len(piece)])
            for n, row in enumerate(piece):
                expected = forced(model, [SOURCES[row]], [[4]])[0]
                torch.testing.assert_close(found[n], expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_sibling_does_not_disturb_a_branch(kind):
    """Two branches of one state, stepped in turn: each keeps what it wrote."""
    model = build(kind=kind)
    _, root = feed(model, model.begin(pad([[4, 5]])), [[2]])
    left, right = root, root
    for a, b in zip([4, 5, 6, 7], [7, 7, 4, 5], strict=True):
        on_left, left = model.step(torch.tensor([a]), left)
        on_right, right = model.step(torch.tensor([b]), right)
    torch.testing.assert_close(on_left[0], forced(model, [[4, 5]], [[4, 5, 6, 7]])[0, -1], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(on_right[0], forced(model, [[4, 5]], [[7, 7, 4, 5]])[0, -1], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_the_cache_is_not_copied_by_a_beam(kind):
    model = build(kind=kind)
    _, state = feed(model, model.begin(pad(SOURCES)), [[2, 2, 2]])
    state = model.select(state, torch.tensor([0, 0, 1, 1, 2, 2]))
    _, state = feed(model, state, [[4] * 6])
    buffer = state.buffer
    for _ in range(8):
        state = model.select(state, torch.tensor([1, 1, 2, 3, 5, 4]))
        _, state = feed(model, state, [[5] * 6])
        assert state.buffer is buffer
    state = model.select(state, torch.tensor([0, 4]))
    assert feed(model, state, [[5] * 2])[1].buffer is buffer


class Rerun:
    """The same model without a cache: the state is the prefix, and each step runs all of it again."""

    def __init__(self, model):
        self.model, self.bos, self.eos, self.vocab_size = model, model.bos, model.eos, model.vocab_size

    def begin(self, inputs):
        return [(row[:n], []) for row, n in zip(inputs.tokens.tolist(), inputs.lengths.tolist(), strict=True)]

    def step(self, tokens, state):
        state = [(source, [*fed, token]) for (source, fed), token in zip(state, tokens.tolist(), strict=True)]
        rows = [forced(self.model, [source], [fed[1:]])[0, -1] for source, fed in state]
        return torch.stack(rows), state

    def select(self, state, rows):
        return [state[r] for r in rows.tolist()]


@pytest.mark.parametrize("pointer", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_searches_equal_running_every_prefix_again(kind, pointer):
    model = build(seed=5, kind=kind, positions="rotary", pointer=pointer)
    source = pad(SOURCES)
    for search, settings in (
        (greedy, {}),
        (beam_search, {"width": 4}),
        (beam_search, {"width": 3, "length_penalty": 1.0}),
        (sample_sequences, {"n": 3}),
    ):
        found = []
        for each in (model, Rerun(model)):
            rest = {"generator": torch.Generator().manual_seed(2)} if search is sample_sequences else {}
            found.append(search(each, source, max_length=7, **settings, **rest))
        fast, slow = found
        assert fast.sequences() == slow.sequences()
        torch.testing.assert_close(fast.scores, slow.scores, rtol=1e-9, atol=1e-9)


def test_search_of_a_batch_equals_one_by_one_and_scores_are_log_probabilities():
    model = build(seed=2)
    found = beam_search(model, pad(SOURCES), width=3, max_length=6)
    for b, source in enumerate(SOURCES):
        alone = beam_search(model, pad([source]), width=3, max_length=6)
        assert alone.sequences()[0] == found.sequences()[b]
        torch.testing.assert_close(alone.scores[0], found.scores[b], rtol=1e-10, atol=1e-10)
    for b, j in itertools.product(range(3), range(3)):
        n = int(found.lengths[b, j])
        if n and bool(found.finished[b, j]):
            score = model.log_prob(pad([SOURCES[b]]), pad([found.tokens[b, j, :n].tolist()])).item()
            assert found.scores[b, j].item() == pytest.approx(score, abs=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_flow_through_steps(kind):
    model = build(kind=kind, pointer=True)
    found, _ = feed(model, model.begin(pad(SOURCES)), [[2, 2, 2], [4, 5, 6]])
    found[:, 1, 5].sum().backward()
    stepped = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    forced(model, SOURCES, [[4], [5], [6]])[:, 1, 5].sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(stepped[name], parameter.grad, rtol=1e-9, atol=1e-9)


def test_training_mode_decodes_with_dropout():
    model = build(dropout=0.5).train()
    with torch.no_grad():
        first, _ = feed(model, model.begin(pad(SOURCES)), [[2, 2, 2], [4, 5, 6]])
        second, _ = feed(model, model.begin(pad(SOURCES)), [[2, 2, 2], [4, 5, 6]])
    assert not torch.equal(first, second)


@pytest.mark.parametrize("kind", KINDS)
def test_inference_mode_and_back(kind):
    model = build(kind=kind, positions="rotary")
    model(pad(SOURCES), pad(TARGETS, end=3))
    with torch.inference_mode():
        quick, _ = feed(model, model.begin(pad(SOURCES)), [[2, 2, 2], [4, 5, 6]])
    model.energy(pad(SOURCES), pad(TARGETS, end=3)).sum().backward()
    with torch.no_grad():
        plain, _ = feed(model, model.begin(pad(SOURCES)), [[2, 2, 2], [4, 5, 6]])
    assert torch.equal(quick, plain)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_float32_and_bfloat16(kind):
    exact = build(kind=kind)
    expected, _ = feed(exact, exact.begin(pad(SOURCES)), [[2, 2, 2], [4, 5, 6], [7, 7, 7]])
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 0.3)):
        model = build(kind=kind, dtype=dtype)
        found, _ = feed(model, model.begin(pad(SOURCES)), [[2, 2, 2], [4, 5, 6], [7, 7, 7]])
        assert found.dtype == torch.float32
        torch.testing.assert_close(found.exp().sum(2), torch.ones(3, 3), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_learned_positions_end(kind):
    model = build(kind=kind, positions="learned", max_positions=8)
    room = 4 if kind == "causal" else 8  # a causal model's source of four symbols stands in the same row
    _, state = feed(model, model.begin(pad(SOURCES)), [[2, 2, 2]] + [[4, 4, 4]] * (room - 1))
    with pytest.raises(ShapeError, match="learned positions reach 8"):
        model.step(torch.tensor([4, 4, 4]), state)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_other_modules_may_stand_for_the_linear_layers(kind):
    """As reduced precision puts them there: a step calls them, the forbidden symbols stay forbidden."""
    model = build(kind=kind, dtype=torch.float32)
    columns = [[2, 2, 2], [4, 5, 6], [7, 7, 7]]
    expected, _ = feed(model, model.begin(pad(SOURCES)), columns)
    reduced = reduce_precision(model, "bf16")
    found, _ = feed(reduced, reduced.begin(pad(SOURCES)), columns)
    assert torch.equal(found.isinf(), expected.isinf())
    torch.testing.assert_close(found, expected, rtol=0.2, atol=0.2)
    torch.testing.assert_close(found, forced(reduced, SOURCES, [[4, 7], [5, 7], [6, 7]]), rtol=1e-4, atol=1e-4)
