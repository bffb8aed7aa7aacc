"""A torch store in which every value is authenticated with the job's secret."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from gpipe_hpc.comm.net.secret import Secret
from gpipe_hpc.torch_compat import PrefixStore, Store


class SealedStore(Store):
    """A wrapper around another store that puts an HMAC with the job's secret before each value.

    A process without the secret that reaches the store can corrupt it, which ends the job, but
    cannot make ranks accept a forged address or report. The HMAC covers the key, too. Counters
    (`add`) are not protected, because the server computes them. Raises `ProofError` for a value
    that is not authentic.

    torch calls the store from C++ without keeping the Python object alive, so a store keeps the
    clones alive that torch requests from it.
    """

    def __init__(self, store: Store, secret: Secret) -> None:
        super().__init__()
        self._store: Any = store  # torch's type stubs lack bytes values and clone
        self._secret = secret
        self._clones: list[SealedStore] = []

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        self._store.set(key, self._sealed(key, value))

    def get(self, key: str) -> bytes:
        """Return a value, waiting until it exists."""
        return self._secret.unseal(f"the store's {key}", self._store.get(key))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Write `desired` if the value equals `expected` ('' if absent); return the new value.

        If the value differs from `expected`, nothing is written and that value is returned.
        """
        before = self._sealed(key, expected) if expected else b""
        found: bytes = self._store.compare_set(key, before, self._sealed(key, desired))
        return self._secret.unseal(f"the store's {key}", found) if found else b""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return its value."""
        answer: int = self._store.add(key, amount)
        return answer

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys exist."""
        answer: bool = self._store.check(keys)
        return answer

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys exist."""
        if timeout is None:
            self._store.wait(list(keys))
        else:
            self._store.wait(list(keys), timeout)

    def delete_key(self, key: str) -> bool:
        """Delete a key; return whether it existed."""
        answer: bool = self._store.delete_key(key)
        return answer

    def num_keys(self) -> int:
        """Return the number of keys."""
        answer: int = self._store.num_keys()
        return answer

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time-out of `get` and `wait`."""
        self._store.set_timeout(timeout)

    @property
    def timeout(self) -> timedelta:
        """Return the time-out of `get` and `wait`."""
        answer: timedelta = self._store.timeout
        return answer

    def has_extended_api(self) -> bool:
        """Return False: there are no operations on several keys."""
        return False

    def clone(self) -> "SealedStore":
        """Return a store with its own connection."""
        clone = SealedStore(self._store.clone(), self._secret)
        self._clones.append(clone)
        return clone

    def let_go(self, clone: "SealedStore") -> None:
        """Drop the store's reference to a clone, which the caller keeps alive from now on."""
        self._clones = [each for each in self._clones if each is not clone]

    def _sealed(self, key: str, value: str | bytes) -> bytes:
        plain = value.encode() if isinstance(value, str) else value
        return self._secret.seal(f"the store's {key}", plain)


def cloned(store: Store) -> tuple[Store, object]:
    """Return a store with its own connection, and an object to keep alive while it is used.

    The connection closes when both are garbage-collected. Returns the store itself if it cannot be
    cloned, as a FileStore.
    """
    duplicate: Any = getattr(store, "clone", None)
    try:
        own: Store = store if duplicate is None else duplicate()
    except RuntimeError:
        return store, None
    inner, source = _innermost(own), _innermost(store)
    if inner is not source and isinstance(inner, SealedStore) and isinstance(source, SealedStore):
        source.let_go(inner)
    return own, inner


def _innermost(store: Store) -> Store:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store
