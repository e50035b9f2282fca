"""Trees on real, tiny targets: a node sees its own ancestors, the cache keeps the accepted path, nothing is lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from helixctl.decoding.cache import RaggedCache
from helixctl.decoding.decoded import DecodeOptions
from helixctl.decoding.distribution import check_samples
from helixctl.decoding.policy import Branches
from helixctl.decoding.sampling import Sampling
from helixctl.decoding.speculative import decode_plain, decode_speculative
from helixctl.decoding.tree import DraftTree, TreeShape, draft_tree, verify_tree
from helixctl.models.drafters.dspark import plugin as dspark
from helixctl.models.drafters.jetspec import plugin as jetspec
from helixctl.models.target import Target
from helixctl.recipe.schema import TargetOptions
from tests.decoding.test_cache import BUILDERS, TAPS, check, pair, prefill, sequences
from tests.decoding.test_decoding_gpu import PROMPTS as SHORT
from tests.decoding.test_decoding_gpu import make
from tests.decoding.test_real_target import PROMPTS, OraclePolicy
from tests.models.drafters.dspark import test_dspark
from tests.models.drafters.jetspec import test_jetspec
from tests.tiny import save_tiny, tiny_gemma3, tiny_llama

STARTS = [3, 57, 9]
SHAPE = TreeShape(block_size=5, budget=11)


def random_trees(anchors: torch.Tensor, seed: int = 0) -> DraftTree:
    logits = torch.randn(len(anchors), 4, 128, generator=torch.Generator().manual_seed(seed)) * 3
    return draft_tree(anchors, lambda slot, tokens: logits[:, slot, None], SHAPE)


@pytest.mark.parametrize("builder", BUILDERS)
@pytest.mark.parametrize("few_queries", [128, 0])
def test_every_node_equals_its_path_alone(
    builder: Callable[[], Any], few_queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows of 8, caps on scores, sinks and experts among them; both ways of attention."""
    monkeypatch.setattr("helixctl.models.attention.FEW_QUERIES", few_queries)
    model, target = pair(builder)
    ids, starts = sequences(3, 0), torch.tensor(STARTS)
    cache, _ = prefill(target, ids, STARTS)
    tree = random_trees(ids.gather(1, starts[:, None])[:, 0])
    assert tree.depths.max() > 1 and tree.tokens.shape == (3, 12)
    places = starts[:, None] + torch.arange(12)
    logits, states = target.decode_step(
        tree.tokens, starts[:, None] + tree.depths, cache, branches=Branches(places, tree.ancestors)
    )
    for row, start in enumerate(STARTS):
        for node, depth in enumerate(tree.depths[row].tolist()):
            path = tree.tokens[row, tree.paths[row, node, : depth + 1]]
            want = model(torch.cat([ids[row, :start], path])[None], output_hidden_states=True)
            torch.testing.assert_close(logits[row, node], want.logits[0, -1], atol=1e-3, rtol=1e-4)
            for tap, state in zip(TAPS, states, strict=True):
                torch.testing.assert_close(state[row, node], want.hidden_states[tap + 1][0, -1], atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize("builder", [tiny_llama, tiny_gemma3])
def test_the_cache_keeps_the_accepted_path_and_nothing_else_is_seen(builder: Callable[[], Any]) -> None:
    model, target = pair(builder)
    ids, starts = sequences(3, 1), torch.tensor(STARTS)
    cache, _ = prefill(target, ids, STARTS)
    tree = random_trees(ids.gather(1, starts[:, None])[:, 0], seed=4)
    leaves = tree.depths.argmax(1)
    leaves[0] = 0  # this row accepts nothing

    def choose(logits: torch.Tensor) -> torch.Tensor:
        """The way to each row's leaf, and 127 everywhere else."""
        choices = torch.full_like(tree.tokens, 127)
        for row, leaf in enumerate(leaves.tolist()):
            for node in tree.paths[row, leaf, 1 : int(tree.depths[row, leaf]) + 1].tolist():
                choices[row, tree.parents[row, node]] = tree.tokens[row, node]
        return choices

    verified = verify_tree(target, cache, tree, starts, choose)
    assert verified.num_accepted.tolist() == tree.depths.gather(1, leaves[:, None])[:, 0].tolist()
    assert min(verified.num_accepted[1:].tolist()) > 1
    for row, (start, kept) in enumerate(zip(STARTS, verified.num_accepted.tolist(), strict=True)):
        ids[row, start + 1 : start + 1 + kept] = verified.tokens[row, :kept]
        want = model(ids[row : row + 1, : start + kept + 1], output_hidden_states=True).hidden_states
        assert verified.positions[row].tolist() == [*range(start, start + 5)]
        for tap, state in zip(TAPS, verified.features, strict=True):
            torch.testing.assert_close(
                state[row, : kept + 1], want[tap + 1][0, start : start + kept + 1], atol=1e-3, rtol=1e-4
            )
    behind = [start + kept + 1 for start, kept in zip(STARTS, verified.num_accepted.tolist(), strict=True)]
    positions = torch.tensor(behind)[:, None] + torch.arange(3)
    check(*target.decode_step(ids.gather(1, positions), positions, cache), model, ids, behind)


def test_moving_copies_in_every_layer_even_where_places_overlap() -> None:
    cache = RaggedCache(2, 8)
    states = torch.randn(2, 3, 8, 4)
    for layer in range(2):
        cache.at(torch.arange(8).expand(2, 8), 8)
        cache.update(states + layer, states - layer, layer)
    sources, places = torch.tensor([[2, 3, 5], [1, 1, 7]]), torch.tensor([[1, 2, 3], [4, 0, 1]])
    cache.move(sources, places)
    expected = states.clone()
    for row in range(2):
        expected[row][:, places[row]] = states[row][:, sources[row]]
    for layer in range(2):
        assert torch.equal(cache._keys[layer], expected + layer)
        assert torch.equal(cache._values[layer], expected - layer)


class OracleTrees(OraclePolicy):
    """Knows the answers, puts most weight on a wrong token at every third position, and checks its features."""

    def branch(self, anchor_ids, positions, call):
        best = torch.stack([self._row(*row) for row in enumerate(zip(anchor_ids, positions, strict=True))])
        wrong = (positions[:, None] + torch.arange(3)) % 3 == 0
        logits = torch.nn.functional.one_hot(best, 128).float() * 8
        logits[..., 7] += 9 * wrong
        return lambda slot, tokens: logits[:, slot, None]


@pytest.mark.parametrize("build", [tiny_llama, tiny_gemma3])
@pytest.mark.parametrize("budget", [1, 3, 12])
def test_trees_equal_plain_decoding_and_feed_the_drafter_its_features(build, budget, tmp_path):
    model = build()
    target = Target.load(TargetOptions(model=str(save_tiny(model, tmp_path))), [0, 2], "cpu", torch.float32)
    options = DecodeOptions(max_new_tokens=17, batch_size=3)
    plain = decode_plain(target, PROMPTS, options)
    hidden = [
        model(torch.tensor([[*one.prompt_ids, *one.tokens]]), output_hidden_states=True).hidden_states for one in plain
    ]
    policy = OracleTrees(plain, [(states[1][0], states[3][0]) for states in hidden])
    found = decode_speculative(target, policy, PROMPTS, replace(options, tree_budget=budget))
    assert [one.tokens for one in found] == [one.tokens for one in plain]
    if budget == 12:
        assert min(one.accept_len or 0 for one in found) > 2


@pytest.mark.parametrize("algorithm", ["dflash", "jetspec", "dspark"])
def test_real_drafters_draft_trees_without_loss(algorithm, tmp_path):
    target, policy = make(tmp_path, "cpu")
    if algorithm == "jetspec":
        policy = jetspec.policy(test_jetspec.make_model(), target.shared)
    if algorithm == "dspark":
        policy = dspark.policy(test_dspark.make_model(), target.shared)
    options = DecodeOptions(max_new_tokens=12, batch_size=3)
    plain = [one.tokens for one in decode_plain(target, SHORT, options)]
    cycles = []
    for budget in (3, 96):
        found = decode_speculative(target, policy, SHORT, replace(options, tree_budget=budget))
        assert [one.tokens for one in found] == plain
        cycles.append(sum(len(one.accepted) for one in found))
    assert cycles[1] < cycles[0]  # of 96 tokens all are candidates behind the anchor


def test_samples_of_a_real_target_are_its_own(tmp_path):
    target, policy = make(tmp_path, "cpu")
    options = DecodeOptions(max_new_tokens=20, batch_size=40, temperature=0.9, seed=2, tree_budget=40)
    found = check_samples(target, decode_speculative(target, policy, SHORT * 10, options), Sampling(0.9))
    assert found.num_tokens == 40 * 20 and found.p_value > 0.001
