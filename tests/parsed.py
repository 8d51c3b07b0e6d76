"""Pages as their elements."""

from html.parser import HTMLParser

VOID = {"meta", "link", "br", "path", "rect"}


class Parsed(HTMLParser):
    """A page's elements as (tag, attributes), its text, and that every element is closed."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.texts = [], [], []
        self.feed(text.replace("<wbr>", ""))  # where a line may end
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)

    def names(self):
        """Fails where a picture, section or table has no accessible name."""
        ids = [attrs["id"] for _, attrs in self.elements if "id" in attrs]
        assert len(set(ids)) == len(ids)
        for attrs in (*self.all("section"), *self.all("svg", role="img")):
            assert {*attrs["aria-labelledby"].split()} <= {*ids}
        assert len(self.all("caption")) == len(self.all("table"))
        assert all(attrs.get("scope") for attrs in self.all("th"))
        assert all(attrs.get("role") or attrs.get("aria-hidden") for attrs in self.all("svg"))

    def all(self, tag, **wanted):
        return [a for t, a in self.elements
                if t == tag and all(a.get(k) == v for k, v in wanted.items())]  # fmt: skip


def said_by(text):
    """The words of a page that is made well."""
    page = Parsed(text)
    page.names()
    return " ".join(" ".join(page.texts).replace("\xa0", " ").split())
