// Search in pages opened from a folder. Browsers refuse web workers on file: addresses, and the
// theme runs its search in one; here the same script runs in a hidden frame instead. It stands in
// for a script that the theme would load from elsewhere. IFrameWorker is the name the theme asks for.
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.title = "search";
      document.documentElement.appendChild(frame);
      const inside = frame.contentWindow;
      inside.importScripts = (...urls) =>
        urls.reduce((before, next) => before.then(() => load(inside, next)), Promise.resolve());
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      load(inside, url).then(() => {
        this.frame = inside;
        this.waiting.forEach((data) => this.postMessage(data));
      });
    }
    postMessage(data) {
      if (this.frame) this.frame.dispatchEvent(new MessageEvent("message", { data }));
      else this.waiting.push(data);
    }
    set onmessage(listener) {
      this.addEventListener("message", listener);
    }
  };
  window.Worker = window.IFrameWorker;
}

function load(inside, url) {
  return new Promise((done, failed) => {
    const script = inside.document.createElement("script");
    script.src = url;
    script.onload = done;
    script.onerror = failed;
    inside.document.body.appendChild(script);
  });
}
