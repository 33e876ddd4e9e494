"""How the bundled demo model is built; `seeing/` builds the one that sees.

example.py        one exchange, its key, and the hash that selects held-out items
arithmetic.py, sequences.py, records.py, calls.py, facts.py (facts.toml), smalltalk.py, words.py     the tasks
prose.py (prose.txt)                plain text without chat markup
corpus.py         mixes tasks and prose into an endless stream of documents
template.py (chat_template.jinja)   renders messages to text
bpe.py            the tokenizer
batches.py        packs documents into rows and computes the loss mask
qwen3.py          the model; checkpoint.py writes it as a Hugging Face folder
adapter.py        trains the bundled LoRA adapter, with PEFT
train.py          runs everything;  evaluate.py, score.py, card.py (card.md): scores and the model card
"""
