"""What each kind of training brings to a run: its data, its pipeline, what it decodes after a validation pass."""

from __future__ import annotations

from typing import Protocol

from helixctl.data.fingerprint import check_tokenizer, load_fast_tokenizer
from helixctl.data.store import Store
from helixctl.lm_plan import AnyPlan, CausalLMPlan
from helixctl.models.tokenizer import load_tokenizer
from helixctl.plan import Plan
from helixctl.recipe.causal_lm import data_sections
from helixctl.training.build import Targets, build_pipeline
from helixctl.training.live import LiveDecoder, decode_options, held_out_prompts
from helixctl.training.lm_build import build_lm_pipeline
from helixctl.training.loop import Observer
from helixctl.training.published import open_for
from helixctl.training.recorder import Live
from helixctl.training.samples import Sampler
from helixctl.training.state import TrainState
from helixctl.training.wiring import Control, Pipeline


class Job(Protocol):
    """One run's own part."""

    @property
    def stores(self) -> tuple[Store, ...]:
        """Prepared documents, opened and found to fit the tokenizer."""

    def build(self, state: TrainState, observer: Observer | None, control: Control) -> Pipeline:
        """All stages, not set up yet; only the first process has an observer."""

    def live(self, state: TrainState, control: Control) -> Live | None:
        """What is decoded after every validation pass; called in the first process. None where there is nothing."""


def make_job(plan: AnyPlan) -> Job:
    """The job of a plan, after the checks that need neither weights nor a device.

    Raises:
        DataError: no store, or one made with another tokenizer.
        CheckpointError: a drafter to start from that is another than the plan's.
    """
    return LMJob(plan) if isinstance(plan, CausalLMPlan) else DrafterJob(plan)


class DrafterJob:
    """Training of a drafter."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        store = Store.open(plan.recipe.data.store)
        check_tokenizer(store, load_fast_tokenizer(plan.recipe.target))
        if plan.recipe.drafter.init_from is not None:
            open_for(plan, plan.recipe.drafter.init_from, starts=True)
        self.stores = (store,)
        self._targets = Targets(plan)

    def build(self, state: TrainState, observer: Observer | None, control: Control) -> Pipeline:
        """See ``Job``."""
        return build_pipeline(self._plan, self.stores[0], state, observer, control, self._targets)

    def live(self, state: TrainState, control: Control) -> Live | None:
        """See ``Job``: the acceptance length on held-out prompts."""
        plan, recipe = self._plan, self._plan.recipe
        limit = recipe.validation.live_prompts
        if not limit or not recipe.validation.every_steps or plan.target.recurrent or recipe.target.features:
            return None
        tokenizer = load_tokenizer(recipe.target)
        options = decode_options(plan, tokenizer)
        prompts = held_out_prompts(self.stores[0], tokenizer, limit, options.max_len)
        return LiveDecoder(plan, self._targets, prompts, options, control) if prompts else None


class LMJob:
    """Training of a causal LM."""

    def __init__(self, plan: CausalLMPlan) -> None:
        self._plan = plan
        self.tokenizer = load_fast_tokenizer(plan.recipe.model)
        self.stores = tuple(Store.open(data.store) for data in data_sections(plan.recipe))
        for store in self.stores:
            check_tokenizer(store, self.tokenizer)

    def build(self, state: TrainState, observer: Observer | None, control: Control) -> Pipeline:
        """See ``Job``."""
        return build_lm_pipeline(self._plan, state, observer, control)

    def live(self, state: TrainState, control: Control) -> Live | None:
        """See ``Job``: the recipe's prompts, continued."""
        validation = self._plan.recipe.validation
        if not validation.prompts or not validation.every_steps:
            return None
        return Sampler(self._plan, self.tokenizer, state, control.progress)
