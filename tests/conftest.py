"""What every test relies on: no network, and the same random state every time."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub

import hypothesis
import pytest
import torch

# The same examples on every run: a failure seen once is seen again.
hypothesis.settings.register_profile("workhorse", deadline=None, derandomize=True)
hypothesis.settings.load_profile("workhorse")


@pytest.fixture(autouse=True)
def _fixed_random_state() -> None:
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `cuda` where there is no CUDA device."""
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("cuda"):
            item.add_marker(skip)
