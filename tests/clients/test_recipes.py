"""Public projects' recipes, each run whole on its first rank. CI runs those of ``test_catalogue`` alone."""

from __future__ import annotations

import os

import pytest

from tests.clients.catalogue import recipes
from tests.clients.conftest import RunEntry


@pytest.mark.skipif("FAKEDIST_RECIPES" not in os.environ, reason="a quarter of an hour: make clients-recipes")
@pytest.mark.parametrize("name", [entry.name for entry in recipes.ENTRIES])
def test_a_public_recipe_runs_as_the_catalogue_says(ran: RunEntry, name: str) -> None:
    ran(name, 0)
