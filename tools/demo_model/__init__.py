"""How the bundled demo model is made.

example.py        one exchange, its key, and the hash that holds some keys out
arithmetic.py, sequences.py, records.py, calls.py, facts.py (facts.toml), smalltalk.py, words.py     the tasks
prose.py (prose.txt)                plain text without the chat's marks
corpus.py         tasks and prose, mixed into an endless stream of documents
template.py (chat_template.jinja)   messages to text
bpe.py            the tokenizer
batches.py        documents to rows, and which tokens the model is to write
qwen3.py          the model; checkpoint.py writes it as a Hugging Face folder
train.py          all of it, run;  evaluate.py, score.py, card.py (card.md): how well it does, and the model card
"""
