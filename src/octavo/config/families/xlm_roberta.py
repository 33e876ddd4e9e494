"""XLM-RoBERTa (Conneau et al. 2019, arXiv:1911.02116), and RoBERTa: BERT whose positions begin behind padding's."""

from dataclasses import replace

from octavo.config.encoders import classifier, num_labels
from octavo.config.families.bert import BERT
from octavo.config.json_fields import JsonFields
from octavo.config.model import DenseStep, PoolingConfig


def _read_classifier(fields: JsonFields) -> PoolingConfig:
    size = fields.integer("hidden_size")
    return classifier(
        "cls",
        DenseStep(name="classifier.dense", in_size=size, out_size=size, activation="tanh"),
        DenseStep(name="classifier.out_proj", in_size=size, out_size=num_labels(fields)),
    )


_XLM = replace(
    BERT,
    name="XLMRobertaModel",
    model_type="xlm-roberta",
    position_offset=2,  # the id of padding, 1, and one more
)
_ROBERTA = replace(_XLM, name="RobertaModel", model_type="roberta")
FAMILIES = tuple(
    family
    for base in (_XLM, _ROBERTA)
    for stem in [base.name.removesuffix("Model")]
    for family in (
        base,
        replace(base, name=f"{stem}ForMaskedLM"),
        replace(base, name=f"{stem}ForSequenceClassification", read_classifier=_read_classifier),
    )
)
