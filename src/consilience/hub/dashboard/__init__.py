"""The dashboard: pages for coordinators, and for a site what its study shows it.

No page needs a script in the browser. Pages are sent with a policy that forbids scripts and
everything from other origins, and a form is accepted only with the token of the visitor to whom
its page was sent.
"""
