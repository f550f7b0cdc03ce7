"""A callback for the tests and for benchmarks/exchange/loss.py, copied beside recipes or on PYTHONPATH. With it
`exchange: auto` takes what it begins with, whatever steps take, and has workers train apart as soon as it may, in
rounds two steps late or as PARTED says (JSON, keys of `exchange`): else that would depend on this machine's clock."""

import json
import os


class Parted:
    def start(self, run):
        from phalanx.recipe import exchanges
        from phalanx.recipe.schema import Outer
        from phalanx.train.exchange import choice

        choice.LIMIT, choice.GAIN, choice.TIE, choice.CHANGED = -1.0, 10.0, 0.0, 10.0
        how = json.loads(os.environ.get("PARTED", "{}"))
        if "outer" in how:
            how["outer"] = Outer(**how["outer"])
        exchanges.APART |= how
        choice.LATEST = exchanges.APART["delay"]
