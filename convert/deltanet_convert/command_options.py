"""Options of a command, declared once: a pydantic model from which the command line and the checked values come.

A field of the model is `name: Annotated[type, typer.Option(help=...)] = default`; pydantic's `Field(ge=...)`, `Literal`
and validators check the value. The option is `--name` unless `typer.Option` names another. A flag such as
`--no-training` turns off the field whose default is True.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo
from typer.models import OptionInfo

from deltanet_hf.errors import UserError, did_you_mean

if TYPE_CHECKING:
    import torch

DTYPES = ("float32", "bfloat16", "float16")
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
ASIDE: Any = Field(exclude=True)  # of an option that decides nothing about the result, or whose contents are recorded


class Options(BaseModel):
    """Base class of a command's options.

    Raises:
        UserError: a value cannot be used; the message names the option.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise UserError(_message(type(self), error)) from None
        self.model_fields_set.intersection_update(values)  # without what defaults have filled in

    @classmethod
    def given(cls, values: dict[str, Any]) -> dict[str, Any]:
        """The values of the fields for what typer passes to the command; options that were not given are left out."""
        flags = {name: field.default for name, field in cls.model_fields.items() if field.annotation is bool}
        present = {name: value for name, value in values.items() if value is not None}
        return {name: flags[name] != value if name in flags else value for name, value in present.items()}


def takes(model: type[Options]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Lets typer see the options of a model as parameters of the command, which gets them as keyword arguments."""

    def with_signature(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command, eval_str=True)
        arguments = [entry for entry in own.parameters.values() if entry.kind is not entry.VAR_KEYWORD]
        options = [_parameter(name, field) for name, field in model.model_fields.items()]
        command.__signature__ = own.replace(parameters=[*arguments, *options])  # type: ignore[attr-defined]
        return command

    return with_signature


def parse_size(value: str, option: str = "--shard-size") -> int:
    """Parses '5GB', '500 MiB' or '4096' into a number of bytes; `option` begins the error."""
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([A-Za-z]*)\s*", value)
    if not match or match[2].upper() not in UNITS:
        raise UserError(f"{option}: got '{value}', expected a size such as 5GB or 500MB")
    size = int(float(match[1]) * UNITS[match[2].upper()])
    if size < 1:
        raise UserError(f"{option}: got '{value}', expected at least 1 byte")
    return size


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of a name in `DTYPES`."""
    import torch

    return getattr(torch, name)


def _parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    """The parameter of a command for a field. One whose default help texts word themselves is None if not given."""
    option, default = _option(field), field.default
    if field.annotation is bool:
        default = False
    elif isinstance(option.show_default, str) or not option.show_default:
        default = None
    text = any(isinstance(entry, BeforeValidator) for entry in field.metadata)  # which reads what the user wrote
    kind = str if text else _typed(_without_none(field.annotation))
    optional = Union[kind, None] if default is None else kind  # noqa: UP007
    annotation = Annotated[optional, option]  # type: ignore[valid-type]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _typed(kind: Any) -> Any:
    """The type that typer reads: that of a `Literal`'s values, and a list for a tuple."""
    if get_origin(kind) is Literal:
        return type(get_args(kind)[0])
    return list[get_args(kind)[0]] if get_origin(kind) is tuple else kind  # type: ignore[misc]


def _without_none(annotation: Any) -> Any:
    parts = [part for part in get_args(annotation) if part is not NoneType]
    return parts[0] if NoneType in get_args(annotation) else annotation


def _option(field: FieldInfo) -> OptionInfo:
    return next(entry for entry in field.metadata if isinstance(entry, OptionInfo))


def _message(model: type[Options], error: ValidationError) -> str:
    """One line about the first value that is wrong: the option, the value, and what it may be."""
    first = error.errors(include_url=False)[0]
    if first["type"] == "extra_forbidden":
        unknown = str(first["loc"][0])
        return f"{unknown}: unknown option{did_you_mean(unknown, model.model_fields)}"
    if not first["loc"] or first["loc"][0] not in model.model_fields:
        return str(first["msg"]).removeprefix("Value error, ")
    name = str(first["loc"][0])
    field = model.model_fields[name]
    flag = next(iter(_option(field).param_decls or ()), f"--{name.replace('_', '-')}")
    limits = {key: getattr(part, key) for part in field.metadata for key in ("ge", "le") if hasattr(part, key)}
    if first["type"] == "literal_error":
        expected = f"one of {', '.join(map(str, get_args(_without_none(field.annotation))))}"
    elif set(limits) == {"ge", "le"}:
        expected = f"a number from {limits['ge']:,} to {limits['le']:,}"
    elif "ge" in limits:
        expected = f"at least {limits['ge']}"
    else:
        expected = str(first["msg"]).removeprefix("Input should be ")
    return f"{flag}: got {first['input']!r}, expected {expected}"
