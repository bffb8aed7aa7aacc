"""Simulation of autograd on an accelerator, where backwards run on a separate thread per device.

For CPU tensors torch's engine runs on the calling thread. For device tensors it has a thread of its
own: the caller waits, and nodes, hooks and unpacking of `saved_tensors_hooks` run on that thread,
on the stream of the forward. Torch transfers its own modes to it; Python state per thread
(`threading.local`, reentrant locks) differs there.
"""

from __future__ import annotations

import contextvars
import queue
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from tests.simulated.locations import inherit, where

if TYPE_CHECKING:
    from tests.simulated.device import SimulatedDevice

Job = Callable[[], None]


class EngineThread:
    """The thread that runs the backwards of one device, started with the first of them."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Job | None] | None = None
        self.ident: int | None = None

    def run(self, device: SimulatedDevice, call: Callable[[], Any]) -> Any:
        """Run a function on the thread; return its result or raise its exception."""
        if threading.get_ident() == self.ident:
            return call()  # a backward within a backward goes on where it is
        if self._jobs is None:
            self._jobs = queue.SimpleQueue()
            thread = threading.Thread(
                target=_work, args=(self._jobs,), name="autograd", daemon=True
            )
            # Not by way of `Thread.start`, which would hand on what the rank's thread plays.
            start = threading.Thread.start
            getattr(start, "__wrapped__", start)(thread)
            weakref.finalize(self, self._jobs.put, None).atexit = False
            self.ident = thread.ident
        done, found = threading.Event(), []
        stream, caller, place = device.current_stream(), threading.get_ident(), where()
        known, grad = dict(device.host.own.clock), torch.is_grad_enabled()
        context = contextvars.copy_context()

        def job() -> None:
            try:
                device.host.learn(known)
                waits = device.waiting_for(caller)
                mode = torch.set_grad_enabled(grad)
                # Torch makes the device that of its thread.
                with inherit(place), device.in_use(), waits, device.on(stream), mode:
                    found.append((context.run(call), None))
            except BaseException as error:
                found.append((None, error))
            found.append(dict(device.host.own.clock))
            done.set()

        self._jobs.put(job)
        done.wait()
        (result, error), learned = found
        device.host.learn(learned)
        if error is not None:
            raise error
        return result


def _work(jobs: queue.SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job()
        del job


class SimulatedEngine:
    """Replacement of torch's engine; `device_of_thread` returns a thread's device."""

    def __init__(self, own: Any, device_of_thread: Callable[[], SimulatedDevice | None]) -> None:
        self._own, self._device_of_thread = own, device_of_thread

    def run_backward(self, *args: Any, **kwargs: Any) -> Any:
        device = self._device_of_thread()
        if device is None:
            return self._own.run_backward(*args, **kwargs)
        return device.engine.run(device, lambda: self._own.run_backward(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name)
