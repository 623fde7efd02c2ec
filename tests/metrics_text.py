"""A node's metrics as a test asks for them: parsed from the text that a scraper gets."""

from attrs import define, field
from prometheus_client.parser import text_string_to_metric_families


@define
class Scraped:
    """One scrape; raises on what is no text format."""

    text: str
    _values: dict[tuple[str, frozenset[tuple[str, str]]], float] = field(init=False)

    @_values.default
    def _parsed(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        found: dict[tuple[str, frozenset[tuple[str, str]]], float] = {}
        for family in text_string_to_metric_families(self.text):
            for sample in family.samples:
                key = sample.name, frozenset(sample.labels.items())
                assert key not in found, f"{sample.name} of {sample.labels} comes twice"
                found[key] = sample.value
        return found

    def all(self, name: str, **labels: str) -> list[tuple[dict[str, str], float]]:
        """The samples of a metric with these labels, and with any others."""
        return [
            (dict(found), value)
            for (each, found), value in self._values.items()
            if each == name and labels.items() <= dict(found).items()
        ]

    def sum(self, name: str, **labels: str) -> float:
        """Of all of those, of which there must be one."""
        found = self.all(name, **labels)
        assert found, f"no {name} of {labels} in:\n{self.text}"
        return sum(value for _, value in found)

    def label_values(self) -> set[str]:
        """All values of labels."""
        return {value for _, labels in self._values for _, value in labels}
