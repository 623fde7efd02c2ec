import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """``pytest tests/core --rewrite-scenarios`` writes what comes out into the scenario files."""
    parser.addoption(
        "--rewrite-scenarios", action="store_true", help="write outcomes into tests/core/scenarios"
    )
