"""What every command shares: output format, server address, and the clients made from them.

The shared options are accepted before the command (`tinkex -f json run list`) and after it
(`tinkex run list --json`); the later one wins. `State` rides on click's context object. It knows
how to make clients and how to print a result, never what a command does.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from tinkex.cli.listing import Listing
from tinkex.cli.output import Table, print_json, print_table

if TYPE_CHECKING:
    from tinkex import AdminClient, RestClient, ServiceClient
    from tinkex.client.config import ClientConfig
    from tinkex.runs.names import NamedRun


@dataclass
class State:
    format: str = "table"
    base_url: str | None = None

    def show(self, shown: Table | str | Callable[[], Table | None], data: Any) -> None:
        """Print a result on stdout: `shown` for people, `data` for programs.

        A function makes what people see only where they do, or prints it by itself.
        `show_items` does the same for a declared listing.
        """
        if self.format == "json":
            print_json(data)
        elif isinstance(shown, str):
            click.echo(shown)
        elif (table := shown() if callable(shown) else shown) is not None:
            print_table(table)

    def show_items(
        self, listing: Listing, items: Sequence[Any], *, total: int | None = None, **data: Any
    ) -> None:
        """Print items of one kind; `data` are further fields of the JSON object."""
        self.show(lambda: listing.table(items, total), {listing.key: items, **data})

    def note(self, text: str) -> None:
        """Say something that is not the result."""
        click.echo(text, err=True)

    @contextlib.contextmanager
    def rest(self) -> Iterator[RestClient]:
        from tinkex import RestClient
        from tinkex.client.session.holder import shared_holder

        yield RestClient(shared_holder(self.config(patient=False)))

    @contextlib.contextmanager
    def admin(self) -> Iterator[AdminClient]:
        from tinkex import AdminClient
        from tinkex.client.session.holder import shared_holder

        yield AdminClient(shared_holder(self.config(patient=False)))

    @contextlib.contextmanager
    def service(
        self, *, patient: bool = True, model: str | None = None, name: str | None = None
    ) -> Iterator[ServiceClient]:
        """`model` is the base model wanted, `name` what the session is called in listings."""
        from tinkex import ServiceClient
        from tinkex.cli.progress import loading_shown
        from tinkex.types.account.checkpoints import is_tinker_path

        config = self.config(patient=patient)
        if model is not None and not is_tinker_path(model):
            config = config.replace(model=model)
        if name:
            config = config.replace(display_name=name)
        with loading_shown(), ServiceClient(config=config) as client:
            yield client

    def go_to(self, run: NamedRun) -> None:
        """Talk to the server that has a run, unless the command names another one.

        Raises:
            ConfigError: It is the private server of another state folder or engine, or one that
                only a file of the folder names.
        """
        from tinkex.errors import ConfigError
        from tinkex.wire.local_servers import private_data_folder

        if self.base_url is not None or not run.server:
            return
        if run.server == "local" and run.data_dir != str(private_data_folder()):
            raise ConfigError(
                f"The run {run.name!r} is on the private server that keeps {run.data_dir}, and the "
                f"one of this command keeps {private_data_folder()}. Set TINKEX_HOME and "
                "TINKEX_LOCAL_ENGINE as they were, or name a server with --base-url."
            )
        if not run.is_named and run.server != "local":
            _check_is_ours(run)
        self.base_url = run.server

    def config(self, *, patient: bool) -> ClientConfig:
        """The settings of a client. One that is not patient gives up after seconds.

        A training run should outlive a server's restart; a person at a prompt should not wait five
        minutes to hear that a server is down.
        """
        from tinkex.client.config import ClientConfig

        # Below the 3 s after which a wait is told: its error would say the same again.
        settings: dict[str, Any] = {} if patient else {"retry_window_s": 2.5}
        # What the user has set in the environment stands above our haste.
        free = {
            name: value
            for name, value in settings.items()
            if f"TINKEX_CLIENT_{name.upper()}" not in os.environ
        }
        return ClientConfig.from_env(base_url=self.base_url, **free)


def _check_is_ours(run: NamedRun) -> None:
    """Refuse to send a key to a server because a folder, which may be anybody's, says so."""
    from tinkex.client.config import ClientConfig, is_loopback
    from tinkex.errors import ConfigError

    with contextlib.suppress(ConfigError):  # no key is set for what the environment names
        if run.server.rstrip("/") == ClientConfig.from_env().base_url:
            return
    if not is_loopback(run.server):
        raise ConfigError(
            f"The folder {run.folder} says that its run is on {run.server}. If you trust that "
            f"server with your key, name it: --base-url {run.server}"
        )


def _keep(ctx: click.Context, param: click.Parameter, value: Any) -> None:
    """Put a shared option into the state; one that was not given changes nothing."""
    state = ctx.ensure_object(State)
    if param.name == "json" and value:
        state.format = "json"
    elif param.name != "json" and value is not None:
        setattr(state, str(param.name), value)


def shared_options() -> list[click.Parameter]:
    """Fresh copies of the options that every command takes."""
    in_state: Any = {"callback": _keep, "expose_value": False}
    return [
        click.Option(
            ["-f", "--format"],
            type=click.Choice(["table", "json"]),
            help="How to print the result.",
            **in_state,
        ),
        click.Option(["--json"], is_flag=True, help="Same as --format json.", **in_state),
        click.Option(
            ["--base-url"], metavar="URL", help="The server; 'local' is this machine.", **in_state
        ),
    ]


class Leaf(click.Command):
    """A command that does something: it takes the shared options as well as its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.extend(shared_options())

    def get_short_help_str(self, limit: int = 45) -> str:
        """The whole first sentence: in a list it goes on below and does not end in dots."""
        return super().get_short_help_str(limit=1000)


class Noun(click.Group):
    """A group of verbs. Its commands take the shared options."""

    command_class = Leaf


pass_state = click.make_pass_decorator(State, ensure=True)
