// Fetches the page again and again, and changes what has changed, so that selections and the scroll position stay.
'use strict';

const INTERVAL = 1000;
const live = document.getElementById('live');
let seen = Date.now();

function show(answers) {
  if (answers) seen = Date.now();
  live.className = answers ? 'on' : 'off';
  const ago = Math.round((Date.now() - seen) / 1000);
  const text = answers ? 'live' : `no answer for ${ago} s`;
  if (live.textContent !== text) live.textContent = text;
}

// Makes `old` like `fresh`, which was made from text in which everything of others is escaped.
function change(old, fresh) {
  if (old.nodeType !== fresh.nodeType || old.nodeName !== fresh.nodeName) {
    old.replaceWith(document.importNode(fresh, true));
    return;
  }
  if (old.nodeType !== Node.ELEMENT_NODE) {
    if (old.nodeValue !== fresh.nodeValue) old.nodeValue = fresh.nodeValue;
    return;
  }
  for (const { name } of [...old.attributes]) {
    if (!fresh.hasAttribute(name)) old.removeAttribute(name);
  }
  for (const { name, value } of fresh.attributes) {
    if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  const before = [...old.childNodes];
  const after = [...fresh.childNodes];
  after.forEach((node, at) => {
    if (at < before.length) change(before[at], node);
    else old.append(document.importNode(node, true));
  });
  before.slice(after.length).forEach((node) => node.remove());
}

async function update() {
  try {
    const answer = await fetch('/', { cache: 'no-store', signal: AbortSignal.timeout(5000) });
    if (!answer.ok) throw new Error(answer.statusText);
    const fresh = new DOMParser().parseFromString(await answer.text(), 'text/html');
    document.title = fresh.title;
    for (const part of ['header > p', 'main']) change(document.querySelector(part), fresh.querySelector(part));
    show(true);
  } catch {
    show(false);
  }
}

async function run() {
  // Nobody looks at a page in the background.
  if (!document.hidden) await update();
  setTimeout(run, INTERVAL);
}

document.addEventListener('visibilitychange', () => { if (!document.hidden) update(); });
show(true);
setTimeout(run, INTERVAL);
