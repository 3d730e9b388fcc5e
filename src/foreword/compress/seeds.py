"""Requests to write a question about the text in the context: five kinds, as in the paper, in several wordings each.

Each has the words that the question begins with, which keep small models to the point.
"""

SEEDS: dict[str, list[tuple[str, str]]] = {
    "structure": [
        ("Write a request to put some facts of the text above into a list.", "Make a list of"),
        ("Write a request for a table of details of the text above.", "Make a table of"),
        ("Write an instruction to turn some details of the text above into JSON.", "Write JSON that tells"),
        ("Write a request for an outline of some events of the text above.", "Outline how"),
    ],
    "summary": [
        ("Write a request for a summary of one part of the text above.", "Summarise the part where"),
        ("Write a question about what happens in the text above.", "What happens when"),
        ("Write a request for the main points of the text above.", "What are the main points about"),
    ],
    "question": [
        ("Write a question about a person of the text above.", "Who"),
        ("Write a question about a detail of the text above.", "What did"),
        ("Write a question about a place of the text above.", "Where"),
        ("Write a question about the order of events in the text above.", "When does"),
        ("Write a question about a reason for something in the text above.", "Why does"),
        ("Write a question about how something happens in the text above.", "How does"),
        ("Write a question about what somebody says or thinks in the text above.", "What does"),
    ],
    "use case": [
        ("Write what somebody who needs the text above for their work would ask.", "I need to know"),
        ("Write what a student of the text above would ask a teacher.", "Can you explain why"),
        ("Write a question that applies a fact of the text above.", "If I were"),
    ],
    "creative": [
        ("Write a request for a short poem about something in the text above.", "Write a short poem about"),
        ("Write a request for a letter about something in the text above.", "Write a letter to"),
        ("Write a question that compares something in the text above with everyday life.", "How is"),
    ],
}
SUMMARISE = "Summarise the text above. Keep every name, number and event."
