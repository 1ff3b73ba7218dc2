"""A window of a real browser on a page."""

from __future__ import annotations

from typing import Any


class Look:
    """A window on a page that keeps what went wrong and what was asked for."""

    def __init__(
        self, browser: Any, address: str, width: int = 1200, scheme: str = "light", touch: bool = False
    ) -> None:
        self.context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, has_touch=touch, accept_downloads=False
        )
        self.page = self.context.new_page()
        self.page.set_default_timeout(10_000)
        self.wrong: list[str] = []
        self.requests: list[str] = []
        self.page.on(
            "console", lambda said: self.wrong.append(said.text) if said.type in ("error", "warning") else None
        )
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(address)

    def close(self) -> None:
        self.context.close()
        assert self.wrong == []

    def rows(self) -> list[str]:
        return list(self.page.locator("#table tbody tr th").all_inner_texts())

    def texts(self, chart: str) -> list[str]:
        """What is written in a chart."""
        return list(self.page.locator(f"[data-chart={chart}] svg text").all_text_contents())

    def lines(self, chart: str) -> list[str]:
        groups = self.page.locator(f"[data-chart={chart}] g[data-row]:has(path.line)")
        return [str(g.get_attribute("data-row")) for g in groups.all()]
