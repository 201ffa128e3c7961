"""What may be asked, with its bounds: the bodies of requests as they stand in the OpenAPI description."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidatorFunctionWrapHandler, field_validator

from thalweg.serve.refusals import RefusedError, of_validation

CHARACTERS = 1024
INPUTS = 256
ANSWERS = 50
WIDTH = 64
LENGTH = 2048
COST = 16384  # answers of a request, at worst, in plain ones
COLUMNS = 4096
IMAGE = 2**20 * 8  # characters of base64

Asked = TypeVar("Asked", bound=BaseModel)
Text = Annotated[str, Field(max_length=CHARACTERS)]
Number = Annotated[float, Field(ge=-1e30, le=1e30, allow_inf_nan=False)]
Name = Annotated[str, Field(max_length=200)]


def limits(characters: int = CHARACTERS) -> dict[str, int]:
    """The bounds that a caller may want to know.

    >>> limits()["inputs"]
    256
    """
    return {"characters": characters, "inputs": INPUTS, "k": ANSWERS, "width": WIDTH, "cost": COST}


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Search(_Request):
    """Options of a search; those left out are the model's own.

    >>> Search(width=3).given()
    {'width': 3}
    """

    k: int | None = Field(default=None, ge=1, le=ANSWERS, description="Answers to each input at most.")
    search: (
        Literal["beam", "greedy", "diverse", "exact", "nucleus", "typical", "min-p", "sample", "stochastic", "mbr"]
        | None
    ) = Field(default=None, description="How answers are searched.")
    width: int | None = Field(default=None, ge=1, le=WIDTH, description="Of a beam.")
    length_penalty: float | None = Field(default=None, ge=-10, le=10)
    max_length: int | None = Field(
        default=None, ge=0, le=LENGTH, description="Symbols at most; 0 suits the training data."
    )
    min_length: int | None = Field(default=None, ge=0, le=LENGTH)
    groups: int | None = Field(default=None, ge=0, le=WIDTH)
    diversity: float | None = Field(default=None, ge=0, le=1000)
    temperature: float | None = Field(default=None, ge=1e-6, le=1e6)
    top_k: int | None = Field(default=None, ge=0, le=10**6)
    top_p: float | None = Field(default=None, gt=0, le=1)
    typical: float | None = Field(default=None, gt=0, le=1)
    min_p: float | None = Field(default=None, gt=0, le=1)
    max_expansions: int | None = Field(
        default=None, ge=1, le=10_000, description="Steps of exact search for each input."
    )
    samples: int | None = Field(default=None, ge=1, le=256, description="Drawn by `mbr`.")
    seed: int | None = Field(default=None, ge=0, le=2**63 - 1)
    prefix: Text | None = Field(default=None, description="What every answer begins with.")
    unknown: Literal["report", "copy"] | None = Field(default=None, description="What becomes of symbols never seen.")

    def given(self, *without: str) -> dict[str, Any]:
        """The options that were given, by name."""
        return {
            name: value
            for name in Search.model_fields
            if name not in without and (value := getattr(self, name)) is not None
        }


class Predict(Search):
    """Inputs to answer. Texts, for a model of strings; rows of numbers; or image files in base64.

    >>> Predict(inputs=["language"], k=2).given()
    {'k': 2}
    """

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        json_schema_extra={
            "examples": [
                {"inputs": ["language"], "k": 3},
                {"model": "demo", "inputs": ["language", "beautiful"], "search": "beam", "width": 8, "attention": True},
                {"inputs": ["thalweg"], "search": "nucleus", "top_p": 0.8, "k": 5, "seed": 1},
            ]
        },
    )

    model: Name | None = Field(default=None, description="A name of `/v1/models`; needed where there are several.")
    inputs: Annotated[
        list[Annotated[str, Field(max_length=IMAGE)] | Annotated[list[Number | None], Field(max_length=COLUMNS)]],
        Field(min_length=1, max_length=INPUTS),
    ]
    features: list[Text] | None = Field(
        default=None, max_length=INPUTS, description="Tags of each input, or of all: `V;PST`."
    )
    attention: bool | None = Field(default=None, description="Also tell where each answer symbol looked.")


class Tree(Search):
    """One input whose beam is to be looked at.

    >>> Tree(input="language", width=3).exact
    False
    """

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        json_schema_extra={"examples": [{"input": "language", "width": 5, "exact": True}]},
    )

    model: Name | None = None
    input: Text
    features: Text | None = None
    exact: bool = Field(default=False, description="Also find the most probable answer, and whether that is proved.")


class Memory(_Request):
    """A spoilt digit to be retrieved.

    >>> Memory(query=[0.0] * 64).steps
    12
    """

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        json_schema_extra={"examples": [{"patterns": "digits", "query": [*([0.0, 8.0] * 32)], "beta": 20.0}]},
    )

    patterns: Literal["digits"] = "digits"
    count: int = Field(default=10, ge=1, le=200, description="Digits that are stored.")
    query: list[Annotated[float, Field(ge=-1000, le=1000)]] = Field(
        min_length=64, max_length=64, description="8 x 8 pixels from 0 to 16, row by row."
    )
    beta: float = Field(default=20.0, ge=1e-6, le=1e4)
    separation: Literal["softmax", "sparsemax", "entmax15"] | Annotated[float, Field(ge=1, le=2)] = Field(
        default="softmax", description="How likeness becomes weight; a number is alpha: 1 is softmax, 2 is sparsemax."
    )
    steps: int = Field(default=12, ge=0, le=100)

    @field_validator("separation", mode="wrap")
    @classmethod
    def _in_one_line(cls, given: Any, check: ValidatorFunctionWrapHandler) -> Any:
        try:
            return check(given)
        except ValidationError:  # which would tell of the names alone
            raise ValueError("must be softmax, entmax15, sparsemax or a number from 1 to 2") from None


Row = Annotated[list[Annotated[float, Field(ge=-1e6, le=1e6)]], Field(min_length=1, max_length=30)]


class Chain(_Request):
    """A small lattice: scores of T positions and C labels.

    >>> Chain(emissions=[[0.0, 1.0]], transitions=[[0.0, 0.0], [0.0, 0.0]]).k
    2
    """

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        json_schema_extra={
            "examples": [
                {
                    "emissions": [[1.0, 0.0], [0.2, 0.4], [0.0, 1.5]],
                    "transitions": [[0.5, -0.5], [-0.5, 0.5]],
                    "force": {"1": 0},
                    "samples": 3,
                }
            ]
        },
    )

    emissions: list[Row] = Field(min_length=1, max_length=100, description="T rows of C scores.")
    transitions: list[Row] = Field(min_length=1, max_length=30, description="C x C; row i, column j scores i -> j.")
    start: Row | None = None
    end: Row | None = None
    force: dict[str, int] = Field(
        default_factory=dict, max_length=100, description="Labels that positions must have: `{position: label}`."
    )
    k: int = Field(default=2, ge=1, le=20)
    samples: int = Field(default=5, ge=0, le=100)
    seed: int = Field(default=0, ge=0, le=2**63 - 1)


async def body_of(request: Request, kind: type[Asked]) -> Asked:
    """The body of a request, checked; anything wrong is a :class:`~thalweg.serve.refusals.RefusedError`."""
    declared = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if declared != "application/json":
        raise RefusedError(415, "media_type", "expected `Content-Type: application/json`")
    try:
        return kind.model_validate_json(await request.body())
    except ValidationError as error:
        raise of_validation(error) from None


def schema_of(kind: type[BaseModel]) -> dict[str, Any]:
    """What OpenAPI says of a body that :func:`body_of` reads."""
    schema = kind.model_json_schema()
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
