"""The app of a site: takes a message, lets :class:`isofed.flower.site.Site` answer it, and sends the answer."""

from __future__ import annotations

import os
from logging import getLogger
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from isofed.errors import IsofedError
from isofed.flower import wire
from isofed.flower.data import Adapter, read_folder
from isofed.flower.site import Reply, Site
from isofed.flower.terms import Refusal
from isofed.flower.wire import BadMessage

log = getLogger("flwr.isofed")  # below Flower's own, so that it appears where Flower writes


def client(adapter: Adapter = read_folder) -> ClientApp:
    """A Flower client app that trains as the run's settings say, on what ``adapter`` reads from the site's folder."""
    app = ClientApp()

    def handle(message: Message, context: Context) -> Message:
        return Message(content=answer(message, context, adapter), reply_to=message)

    for kind in (app.train, app.evaluate, app.query):
        kind()(handle)
    return app


def answer(message: Message, context: Context, adapter: Adapter = read_folder) -> Any:
    """The content of a reply. Whatever goes wrong is one sentence, which tells nothing about the site's data."""
    try:
        facts = wire.facts(message.content)
        site = Site(context.run_config, context.node_config, adapter)
        reply = site.do(facts, lambda must, may: wire.tensors(message.content, must, may))
        _remember(context, facts)
    except (Refusal, BadMessage) as error:
        log.error("isofed: this site %s", error)
        reply = Reply({"problem": str(error)}, {})
    except Exception as error:
        # The whole message may name files, so only its kind is sent.
        log.error("isofed: %s", error, exc_info=not isinstance(error, IsofedError) or "ISOFED_DEBUG" in os.environ)
        reply = Reply({"problem": f"failed with {type(error).__name__}; its own log says why"}, {})
    return wire.content(reply.facts, wire.record(reply.tensors))


def _remember(context: Context, facts: wire.Facts) -> None:
    """Note in the node's context which state is the newest; the state itself is on the site's disk."""
    if facts.get("do") == "train":
        from flwr.app import ConfigRecord

        context.state["isofed"] = ConfigRecord({"run": facts["run"], "round": facts["round"]})
