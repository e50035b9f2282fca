from __future__ import annotations

import threading

import pytest

from helixctl.engine.beside import called_beside


def test_work_is_called_again_and_again_and_has_ended_with_the_block() -> None:
    calls, enough = [], threading.Event()

    def work(ended: threading.Event) -> None:
        calls.append(threading.current_thread().name)
        if len(calls) == 3:
            enough.set()
            ended.wait()  # cut short by the end of the block

    with pytest.raises(KeyError), called_beside(work, "beside", 0.001):
        enough.wait()
        raise KeyError
    assert calls == ["beside"] * 3
    assert all(thread.name != "beside" for thread in threading.enumerate())
