# SPDX-License-Identifier: Apache-2.0
"""Fixtures of the tool's tests."""
import pytest

from . import project as fake


@pytest.fixture(scope="session")
def template(tmp_path_factory) -> fake.Project:
    """Built once per worker; never to be changed by a test."""
    return fake.make_template(tmp_path_factory.mktemp("template") / "room")


@pytest.fixture
def project(template, tmp_path) -> fake.Project:
    """A copy of the template with a warm cache, for one test."""
    return fake.copy_of(template, tmp_path / "room")


@pytest.fixture
def applied(project) -> fake.Project:
    """The same, with the stack applied at `project.tree`."""
    project.apply()
    return project
