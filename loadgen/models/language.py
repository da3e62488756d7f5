"""AWD-LM and BERT-large.

AWD-LM is the three-layer LSTM on WikiText-2 that the papers measured: 33,278 words, embedding and
hidden size 1,500, the decoder's weight tied to the embedding. The tied tensor belongs to the
embedding, the *first* layer: its gradient is whole only when the backward pass ends there.
BERT-large is Devlin et al. (2019): 24 encoder layers, with the two tensors of a classification
head; work is counted for sequences of 512.
"""

from slackwater.loadgen.models.network import Network

WIKITEXT2_WORDS = 33_278
AWD_HIDDEN = 1500
AWD_LAYERS = 3
AWD_SEQUENCE = 70

BERT_WORDS = 30_522
BERT_HIDDEN = 1024
BERT_LAYERS = 24
BERT_FEED_FORWARD = 4096
BERT_SEQUENCE = 512


def awd_lm() -> Network:
    net = Network()
    hidden, words = AWD_HIDDEN, WIKITEXT2_WORDS
    # A look-up copies one row a word: as much work as one multiply-add per element.
    net.layer("embedding", float(AWD_SEQUENCE * hidden), weight=(words, hidden))
    for index in range(AWD_LAYERS):
        net.layer(
            f"lstm{index}",
            float(AWD_SEQUENCE * 4 * hidden * (hidden + hidden)),
            weight_input=(4 * hidden, hidden),
            weight_hidden=(4 * hidden, hidden),
            bias_input=(4 * hidden,),
            bias_hidden=(4 * hidden,),
        )
    net.layer("decoder", float(AWD_SEQUENCE * hidden * words), bias=(words,))
    return net


def bert_large() -> Network:
    net = Network()
    hidden, sequence = BERT_HIDDEN, BERT_SEQUENCE
    lookup = float(sequence * hidden)
    net.layer("embeddings.word", lookup, weight=(BERT_WORDS, hidden))
    net.layer("embeddings.position", lookup, weight=(512, hidden))
    net.layer("embeddings.type", lookup, weight=(2, hidden))
    _layer_norm(net, "embeddings.norm")
    for index in range(BERT_LAYERS):
        _encoder_layer(net, f"encoder{index}")
    _linear(net, "pooler", 1, hidden, hidden)  # Only the first token is pooled.
    _linear(net, "head", 1, hidden, 2)
    return net


def _encoder_layer(net: Network, name: str) -> None:
    hidden, sequence = BERT_HIDDEN, BERT_SEQUENCE
    for part in ("query", "key", "value"):
        _linear(net, f"{name}.{part}", sequence, hidden, hidden)
    # Scores and weighted values have no tensors of their own.
    net.layer(f"{name}.attention", float(2 * sequence * sequence * hidden))
    _linear(net, f"{name}.output", sequence, hidden, hidden)
    _layer_norm(net, f"{name}.output_norm")
    _linear(net, f"{name}.expand", sequence, hidden, BERT_FEED_FORWARD)
    _linear(net, f"{name}.contract", sequence, BERT_FEED_FORWARD, hidden)
    _layer_norm(net, f"{name}.norm")


def _linear(net: Network, name: str, tokens: int, inputs: int, outputs: int) -> None:
    work = float(tokens * inputs * outputs)
    net.layer(name, work, weight=(outputs, inputs), bias=(outputs,))


def _layer_norm(net: Network, name: str) -> None:
    work = float(2 * BERT_SEQUENCE * BERT_HIDDEN)
    net.layer(name, work, scale=(BERT_HIDDEN,), shift=(BERT_HIDDEN,))
