"""Trees of drafts: the best candidates for a block under a budget, and the way that the target takes through them.

A chain spends all drafts on one continuation; a tree spends them where the drafter sees most weight. Of all trees with
`budget` nodes the one is drafted whose nodes are likeliest, each weighed with all before it: if the drafter's odds were
the target's, no other of that size would be accepted further. The target verifies the nodes in one forward, where a
node stands at the position of its depth and sees its own ancestors only. Trees from the slots of one parallel forward
are those of https://arxiv.org/abs/2606.18394 and https://arxiv.org/abs/2604.12989.

What is emitted never hangs on the drafts: behind every node the target chooses a token, the best or a sample from its
own distribution, and goes on where that token is a node. So greedy output is plain greedy output, and samples are the
target's own. For candidates that are not drawn themselves this is the recursive rejection rule (SpecInfer,
https://arxiv.org/abs/2305.09781): a candidate is kept with the share that the target gives it of what is left.

Legend: R rows, B block_size, W candidates of one depth, T nodes of a tree, its anchor included, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from helixctl.decoding.decoded import DecodeOptions
from helixctl.decoding.policy import Branches, DecodeTarget, DraftPolicy, NextLogits, RowCache, TreePolicy
from helixctl.errors import UsageError


@dataclass(frozen=True, eq=False)
class DraftTree:
    """A tree per row. Node 0 is the anchor, and every node comes behind its parent; siblings have different tokens."""

    tokens: Tensor
    """[R, T] int64."""
    depths: Tensor
    """[R, T] int64: 0 is the anchor's, at most B - 1."""
    paths: Tensor
    """[R, T, B] int64: the node's ancestor at every depth, and from its own depth on itself."""

    @property
    def ancestors(self) -> Tensor:
        """[R, T, T] bool: whether node t is node s or behind it."""
        rows, size, _ = self.paths.shape
        none = torch.zeros(rows, size, size, dtype=torch.bool, device=self.paths.device)
        return none.scatter(2, self.paths, True)

    @property
    def parents(self) -> Tensor:
        """[R, T] int64; the anchor is its own."""
        return self.paths.gather(2, (self.depths - 1).clamp(min=0).unsqueeze(-1)).squeeze(-1)

    def take(self, rows: Tensor) -> DraftTree:
        """The trees of ``rows`` [R'] int64."""
        return DraftTree(self.tokens[rows], self.depths[rows], self.paths[rows])


@dataclass(frozen=True, eq=False)
class Verified:
    """What the target made of drafts, along the path that it took; what lies behind its end means nothing."""

    num_accepted: Tensor  # [R] int64, drafts on the path
    tokens: Tensor  # [R, B] int64, what the target chose: the accepted drafts, then its own next token
    features: Sequence[Tensor]  # K x [R, B, H], of the anchor and the accepted drafts
    positions: Tensor  # [R, B] int64


@dataclass(frozen=True)
class TreeShape:
    """How trees are drafted."""

    block_size: int
    """B; no draft is deeper than B - 1."""
    budget: int
    """Drafts, the anchor not counted."""
    temperature: float = 1.0
    """That the target samples with; 1 where it does not."""


def tree_shape(options: DecodeOptions, block_size: int) -> TreeShape | None:
    """What ``options`` ask for; None where they ask for one continuation."""
    if options.tree_budget is None:
        return None
    sampling = options.sampling
    return TreeShape(block_size, options.tree_budget, 1.0 if sampling is None else sampling.temperature)


def tree_policy(options: DecodeOptions, policy: DraftPolicy) -> TreePolicy | None:
    """The drafter as one that drafts trees, where ``options`` ask for them.

    Raises:
        UsageError: it cannot, or blocks are to be cut as well.
    """
    if options.tree_budget is None:
        return None
    if options.confidence_threshold is not None:
        raise UsageError(
            "a tree of drafts is not cut by a confidence threshold: its budget says what is verified",
            fix="give one of the two",
        )
    if options.tree_budget < 1:
        raise UsageError(f"a tree of {options.tree_budget} drafts", fix="give a tree budget of 1 or more")
    if not isinstance(policy, TreePolicy):
        raise UsageError("this drafter drafts no trees, only one continuation", fix="leave the tree budget out")
    return policy


def cycle_span(options: DecodeOptions, block_size: int) -> int:
    """Places of a row's cache that a cycle may write, from the anchor's on."""
    return max(block_size, 1 + (options.tree_budget or 0))


def draft_tree(anchor_ids: Tensor, next_logits: NextLogits, shape: TreeShape) -> DraftTree:
    """The likeliest drafts behind anchors [R] int64: as many as the budget allows, or all there are.

    ``next_logits`` (see ``TreePolicy.branch``) is asked slot by slot. Every operation has a fixed shape and stays on
    the device, so that a CUDA graph can hold it.
    """
    rows, block_size = len(anchor_ids), shape.block_size
    nodes = _Nodes(
        tokens=anchor_ids[:, None],
        scores=torch.zeros(rows, 1, device=anchor_ids.device),
        paths=anchor_ids.new_zeros(rows, 1, block_size),
    )
    levels, size = [nodes], 1
    for depth in range(1, block_size):
        nodes = _likeliest(nodes, next_logits(depth - 1, nodes.tokens), shape)
        width = nodes.tokens.shape[1]
        own = torch.arange(size, size + width, device=anchor_ids.device)
        nodes.paths[:, :, depth:] = own[:, None]
        levels.append(nodes)
        size += width
    # A node is no likelier than its parent, which stands before it: a stable sort puts every parent first.
    order = torch.cat([level.scores for level in levels], dim=1).sort(dim=1, descending=True, stable=True).indices
    rank = order.argsort(dim=1)  # where each node came out
    order = order[:, : 1 + shape.budget]
    paths = torch.cat([level.paths for level in levels], dim=1)
    paths = paths.gather(1, order.unsqueeze(-1).expand(-1, -1, block_size))  # [R, T, B]
    paths = rank.gather(1, paths.flatten(1)).view_as(paths)
    own = torch.arange(order.shape[1], device=order.device)
    return DraftTree(
        tokens=torch.cat([level.tokens for level in levels], dim=1).gather(1, order),
        depths=(paths != own[:, None]).sum(-1),
        paths=paths,
    )


def accepted_path(tree: DraftTree, choices: Tensor) -> tuple[Tensor, Tensor]:
    """How far the target goes along the tree.

    Args:
        tree: T nodes per row.
        choices: The token that the target chooses behind every node, [R, T] int64.

    Returns:
        The accepted drafts, [R] int64, and the nodes from the anchor to the last of them, [R, B] int64, which is
        repeated behind the end.
    """
    chosen = tree.tokens == choices.gather(1, tree.parents)
    chosen = chosen | (tree.depths == 0)
    reached = chosen.gather(1, tree.paths.flatten(1)).view_as(tree.paths).all(-1)  # [R, T], one path
    num_accepted, last = tree.depths.masked_fill(~reached, -1).max(dim=1)
    path = tree.paths.gather(1, last.view(-1, 1, 1).expand(-1, 1, tree.paths.shape[2])).squeeze(1)
    return num_accepted, path


def verify_tree(
    target: DecodeTarget, cache: RowCache, tree: DraftTree, starts: Tensor, choose: Callable[[Tensor], Tensor]
) -> Verified:
    """One forward of the target over trees whose anchors stand at ``starts`` [R]; the cache keeps the accepted path.

    ``choose`` gives the target's tokens [R, T] from logits [R, T, V]. The cache was told what length to expect: the
    tree is held at ``starts`` and the T - 1 places behind.
    """
    size, block_size = tree.paths.shape[1:]
    places = starts[:, None] + torch.arange(size, device=starts.device)
    branches = Branches(places, tree.ancestors)
    logits, features = target.decode_step(tree.tokens, starts[:, None] + tree.depths, cache, branches=branches)
    choices = choose(logits)
    num_accepted, path = accepted_path(tree, choices)
    positions = starts[:, None] + torch.arange(block_size, device=starts.device)  # [R, B]
    cache.move(starts[:, None] + path, positions)
    kept = [taps.gather(1, path.unsqueeze(-1).expand(-1, -1, taps.shape[-1])) for taps in features]
    return Verified(num_accepted, choices.gather(1, path), kept, positions)


@dataclass(frozen=True, eq=False)
class _Nodes:
    """Candidates of one depth, likeliest first."""

    tokens: Tensor  # [R, W] int64
    scores: Tensor  # [R, W] float32, log-probability with all before them
    paths: Tensor  # [R, W, B] int64, see ``DraftTree``, numbered over all depths


def _likeliest(nodes: _Nodes, logits: Tensor, shape: TreeShape) -> _Nodes:
    """The best children of all ``nodes``, from logits [R, W or 1, V] behind each; their paths end at the parents.

    As many as the budget: no other can be in the tree, whose nodes are the best of all depths.
    """
    best = logits.topk(min(shape.budget, logits.shape[-1]), dim=-1)  # [R, W or 1, k]
    whole = (logits.float() / shape.temperature).logsumexp(-1, keepdim=True)
    gains = (best.values.float() / shape.temperature - whole).clamp(max=0.0)
    gains = gains.masked_fill(gains.isnan(), float("-inf"))  # a drafter that is broken must not order the tree
    scores = nodes.scores.unsqueeze(-1) + gains  # [R, W, k]
    _, width, fan = scores.shape
    found = scores.flatten(1).topk(min(shape.budget, width * fan), dim=1)
    parents = found.indices // fan
    tokens = best.indices.expand(-1, width, -1).flatten(1).gather(1, found.indices)
    paths = nodes.paths.gather(1, parents.unsqueeze(-1).expand(-1, -1, nodes.paths.shape[2]))
    return _Nodes(tokens, found.values, paths)
