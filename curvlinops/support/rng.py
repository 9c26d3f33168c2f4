"""Generators of random numbers: seeded ones, and the global ones, which are left as found."""

import ctypes
import pickle
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from curvlinops.support.arguments import check_count
from curvlinops.support.devices import generators

#: The seed of sampled labels where none is given, so that they are the same in each pass.
DEFAULT_SEED = 2**31 - 1


def seeded(device: torch.device | str, *seeds: int) -> torch.Generator:
    """Return a generator for a device, seeded by non-negative integers, whose order matters."""
    # neighboring seeds make correlated generators: mix them
    mixed = np.random.SeedSequence(seeds).generate_state(1, np.uint64)
    return torch.Generator(device).manual_seed(int(mixed[0]) >> 1)


def read_generator(
    device: torch.device, seed: int | None, generator: torch.Generator | None
) -> torch.Generator:
    """Return the generator on a device that the arguments ``seed`` and ``generator`` describe.

    A generator of another device seeds it. With neither argument it is seeded by PyTorch's global
    generator, so that ``torch.manual_seed`` makes the numbers repeatable.
    """
    check_source(seed, generator)
    if seed is not None:
        return seeded(device, check_count("seed", seed, at_least=0))
    if generator is not None and generator.device == device:
        return generator
    source = torch.device("cpu") if generator is None else generator.device
    drawn = torch.randint(2**62, (), generator=generator, device=source)
    return seeded(device, int(drawn))


def check_source(seed: int | None, generator: torch.Generator | None) -> None:
    """Check the arguments ``seed`` and ``generator``, and draw nothing; see ``read_generator``."""
    if seed is not None and generator is not None:
        raise ValueError("Pass either seed or generator, not both.")
    if seed is not None:
        check_count("seed", seed, at_least=0)
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(
            f"generator must be a torch.Generator, got a {type(generator).__name__}. Integers are "
            "passed as seed."
        )


class GeneratorStates:
    """The states of all global random number generators at construction."""

    def __init__(self) -> None:
        self._python, self._numpy = random.getstate(), _numpy_memory()
        self._numpy_state = _numpy_state(self._numpy)
        if self._numpy != _numpy_memory():  # another thread draws from it
            _numpy_state.cache_clear()
        self._torch = [(generator, generator.get_state()) for generator in generators()]

    def are_current(self) -> bool:
        """Return whether the generators still have these states."""
        return (
            self._python == random.getstate()
            and self._numpy == _numpy_memory()
            and all(torch.equal(state, generator.get_state()) for generator, state in self._torch)
        )

    def restore(self) -> None:
        """Set the generators to these states."""
        random.setstate(self._python)
        if self._numpy != _numpy_memory():
            np.random.set_state(self._numpy_state)
        for generator, state in self._torch:
            generator.set_state(state)


@lru_cache(maxsize=8)
def _numpy_state(memory: bytes) -> Any:
    """Return the state of NumPy's generator with this memory; reading it takes 80 microseconds."""
    return np.random.get_state(legacy=False)


def _numpy_memory() -> bytes:
    """Return all bytes of NumPy's generator: its state, if it is not of the usual kind.

    Else 624 words, the position among them, and the fields of the object that draws: one is a
    normal number that waits to be drawn.
    """
    generator, source = np.random.get_bit_generator(), np.random.mtrand._rand
    if type(generator) is not np.random.MT19937:
        return pickle.dumps(np.random.get_state(legacy=False))
    fields = ctypes.string_at(id(source), type(source).__basicsize__)
    # without the count of references and the type, with which each object begins
    return ctypes.string_at(generator.ctypes.state_address, 2500) + fields[object.__basicsize__ :]


@contextmanager
def preserved_rng() -> Iterator[None]:
    """Restore all global random number generators on exit (loaders draw from them, too)."""
    states = GeneratorStates()
    try:
        yield
    finally:
        states.restore()


def apart(items: Iterable) -> Iterator[Any]:
    """Iterate over items whose source may draw random numbers, apart from the caller's."""
    end = object()
    with preserved_rng():
        rest, states = iter(items), GeneratorStates()
    while True:
        with preserved_rng():
            states.restore()
            item, states = next(rest, end), GeneratorStates()
        if item is end:
            return
        yield item


def seed_everything(seed: int) -> None:
    """Seed all global random number generators; inside ``preserved_rng`` only."""
    # torch.manual_seed would also seed generators of unused devices, which are not restored
    for generator in generators():
        generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
