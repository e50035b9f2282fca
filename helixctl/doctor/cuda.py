"""What touches CUDA, and what forks: shared by the rules about either."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from helixctl.doctor.flow import Flow
from helixctl.doctor.index import Function
from helixctl.doctor.names import UNKNOWN_VALUE, Called
from helixctl.doctor.source import Source

DATALOADER = "torch.utils.data.DataLoader"
LOADER_POSITIONS = {"num_workers": 5, "collate_fn": 6, "pin_memory": 7, "timeout": 9, "worker_init_fn": 10}
# fmt: off
_INITIALISING_NAMES = (
    "init", "current_device", "set_device", "get_device_name", "get_device_capability",
    "get_device_properties", "synchronize", "Stream", "Event", "mem_get_info", "memory_allocated",
    "memory_reserved", "max_memory_allocated", "reset_peak_memory_stats", "current_stream", "default_stream",
    "ipc_collect", "get_rng_state", "get_rng_state_all", "current_blas_handle", "CUDAGraph",
)
_ALLOCATING_NAMES = (
    "tensor", "zeros", "ones", "empty", "full", "rand", "randn", "randint", "arange", "eye", "linspace",
    "as_tensor", "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randperm",
    "set_default_device",
)
# fmt: on
_INITIALISING = frozenset(f"torch.cuda.{name}" for name in _INITIALISING_NAMES)
_ALLOCATING = frozenset(f"torch.{name}" for name in _ALLOCATING_NAMES)
_LAZY = frozenset({"torch.device", "torch.Generator", "torch.autocast", "torch.amp.autocast", "torch.amp.GradScaler"})
_PLACED_BY_KEYWORD = {"torch.nn.parallel.DistributedDataParallel": "device_ids", "transformers.pipeline": "device"}
_RANKS = frozenset({"rank", "local_rank", "gpu", "gpu_id", "device_id"})
_PROCESSES = ("multiprocessing.Process", "multiprocessing.Pool", "multiprocessing.Manager")
_EXECUTOR = "concurrent.futures.ProcessPoolExecutor"
_CONTEXT = "multiprocessing.get_context()"


def is_cuda_call(source: Source, node: ast.Call) -> bool:
    """Whether a call creates a CUDA context in this process, as far as it shows."""
    name = source.names.qualified(node.func)
    if name in _INITIALISING:
        return True
    if name is not None and (name in _LAZY or name.startswith("torch.cuda.")):
        return False
    if name in _ALLOCATING:
        device = node.args[0] if name == "torch.set_default_device" and node.args else _keyword(node, "device")
        return names_cuda(source, device)
    if name in _PLACED_BY_KEYWORD:
        return _is_device(source, _keyword(node, _PLACED_BY_KEYWORD[name]))
    if isinstance(node.func, ast.Attribute):
        return _is_move(source, node, node.func)
    return names_cuda(source, _keyword(node, "device_map"))


def _is_move(source: Source, node: ast.Call, function: ast.Attribute) -> bool:
    """`x.cuda()`, `x.to("cuda")`, `Model.from_pretrained(..., device_map="cuda")`."""
    if function.attr == "cuda":
        known = {keyword.arg for keyword in node.keywords} <= {"device", "non_blocking", "memory_format"}
        base = getattr(function.value, "id", "")
        return known and len(node.args) < 2 and not base[:1].isupper()
    if function.attr == "to":
        candidates = [*node.args[:1], *(k.value for k in node.keywords if k.arg == "device")]
        return any(_is_device(source, candidate) for candidate in candidates)
    if function.attr == "from_pretrained":
        device = _keyword(node, "device_map")
        return names_cuda(source, device) or (isinstance(device, ast.Constant) and device.value in ("auto", 0))
    return False


def _is_device(source: Source, node: ast.expr | None) -> bool:
    """Whether an argument that places something means a CUDA device: by its name, its number, or that of a rank."""
    if node is None:
        return False
    if isinstance(node, ast.List | ast.Tuple):
        return any(_is_device(source, element) for element in node.elts)
    number = source.names.constant(node)
    is_number = isinstance(number, int) and not isinstance(number, bool) and number >= 0
    called = getattr(node, "attr", None) or getattr(node, "id", None)
    accelerated = source.names.qualified(node) == "accelerate.Accelerator().device"
    return is_number or called in _RANKS or accelerated or names_cuda(source, node)


def names_cuda(source: Source, node: ast.expr | None) -> bool:
    """Whether an expression is made of a CUDA device's name: "cuda", f"cuda:{i}", "cuda" if ... else "cpu"."""
    return any(text == "cuda" or text.startswith("cuda:") for text in source.names.strings(node))


def cuda_flow(source: Source) -> Flow:
    """When CUDA is touched."""
    return Flow(source, lambda call: is_cuda_call(source, call))


def loaders(source: Source) -> Iterator[tuple[Called, ast.expr]]:
    """DataLoaders that may start workers, with their `num_workers`; those that show none are left out."""
    for call in source.calls_of(DATALOADER):
        workers = call.argument("num_workers", LOADER_POSITIONS["num_workers"])
        if workers is not None and source.names.constant(workers) not in (0, None, False):
            yield call, workers


def loader_context(source: Source, call: Called) -> str | None:
    """How a loader's workers start: a method's name, "given" where it cannot be read, None for the default."""
    context = call.argument("multiprocessing_context")
    if context is None:
        return "given" if call.open else None
    value = source.names.value(context)
    if isinstance(value, ast.Constant):
        return str(value.value) if value.value is not None else None
    method = context_method(source, value)
    return method if method is not None else "given"


def context_method(source: Source, node: ast.expr) -> str | None:
    """The start method of `get_context("fork")`; None for anything else."""
    value = source.names.value(node)
    if not isinstance(value, ast.Call) or source.names.qualified(value.func) != "multiprocessing.get_context":
        return None
    arguments = [*value.args[:1], *(k.value for k in value.keywords if k.arg == "method")]
    method = source.names.constant(arguments[0]) if arguments else "default"
    return "default" if method is None else str(method) if method is not UNKNOWN_VALUE else "given"


def process_starts(source: Source) -> Iterator[tuple[Called, str]]:
    """Calls that make processes, with their start method: "fork", "spawn", "default", "given"."""
    for call in source.calls:
        if call.names & set(_PROCESSES):
            yield call, global_method(source) or "default"
        elif _EXECUTOR in call.names:
            context = call.argument("mp_context", 1)
            if context is None and not call.open:
                yield call, global_method(source) or "default"
            elif context is not None:
                yield call, context_method(source, context) or "given"
        elif call.name.startswith(f"{_CONTEXT}.") and call.name.rsplit(".", 1)[1] in ("Process", "Pool", "Manager"):
            function = call.node.func
            if isinstance(function, ast.Attribute):
                yield call, context_method(source, function.value) or "given"


def global_method(source: Source) -> str | None:
    """What the file sets with `set_start_method`; "given" where it cannot be read."""
    for call in source.calls_of("multiprocessing.set_start_method"):
        method = source.names.constant(call.argument("method", 0))
        return method if isinstance(method, str) else "given"
    return None


def _keyword(node: ast.Call, name: str) -> ast.expr | None:
    return next((keyword.value for keyword in node.keywords if keyword.arg == name), None)


def is_none(node: ast.expr) -> bool:
    """The literal None."""
    return isinstance(node, ast.Constant) and node.value is None


def execs(source: Source, fork: ast.Call) -> bool:
    """Whether the function that forks also execs, so that the child is another program."""
    scope = source.index.scope_node(fork)
    names = (source.names.qualified(node.func) for node in ast.walk(scope) if isinstance(node, ast.Call))
    return any(name is not None and name.startswith("os.exec") for name in names)


def in_default(source: Source, node: ast.AST) -> bool:
    """Whether a node is in the default of a parameter."""
    current = node
    for parent in source.index.ancestors(node):
        if isinstance(parent, ast.arguments):
            return current in parent.defaults or current in parent.kw_defaults
        if isinstance(parent, ast.stmt):
            return False
        current = parent
    return False


def loader_functions(source: Source, call: Called) -> Iterator[Function]:
    """Functions of this file that run in a loader's workers: collate_fn, worker_init_fn, the dataset's own."""
    for name in ("collate_fn", "worker_init_fn"):
        function = source.names.function(call.argument(name, LOADER_POSITIONS[name]))
        if function is not None:
            yield function
    dataset = call.argument("dataset", 0)
    value = source.names.value(dataset) if dataset is not None else None
    owner = source.names.definition(value.func) if isinstance(value, ast.Call) else None
    if not isinstance(owner, ast.ClassDef):
        return
    for name in ("__getitem__", "__getitems__", "__iter__"):
        method = source.names.method(owner, name)
        if method is not None:
            yield method
